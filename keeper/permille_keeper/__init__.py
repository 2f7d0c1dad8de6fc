"""The keeper: a second party that removes the masks from sums of devices, and adds noise (FORMAT 13.7).

The keeper sees which devices took part, but none of their integers. The service sees masked integers, but no
masks. Together they would see all, so another party than the service's operator must run the keeper.
"""
