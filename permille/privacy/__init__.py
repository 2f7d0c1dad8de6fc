"""Privacy of the devices of a federation: exact noise, what it costs, and masks that only a keeper lifts."""
