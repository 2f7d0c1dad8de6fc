"""The program that keeps a device up to date without commands of the user."""
