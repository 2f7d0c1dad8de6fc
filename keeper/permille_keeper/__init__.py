"""The keeper: a second party that lifts masks from sums of many devices, and adds the noise (FORMAT 13.7).

It sees which devices took part and never an integer of theirs; the service sees masked integers and never a
mask. It belongs into other hands than the service: together the two see everything.
"""
