"""From chats and answers to rows, and from rows to the steps that see them."""
