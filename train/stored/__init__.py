"""What a target said, kept on disk: its final states, or its likeliest ids."""
