"""Starts without gradient descent: least squares in closed form."""
