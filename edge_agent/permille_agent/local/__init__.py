"""Using the personalised model on this device: text, chat, comparison, a local server, export."""
