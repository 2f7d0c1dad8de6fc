"""The keeper: a second party that computes the sum of the devices' masks, minus noise (FORMAT 13.7).

In a round with a keeper, each device adds a random mask to its integers before it sends them. The service
gets the masked integers, and the keeper can compute the masks. The keeper sees which devices took part, but
none of their integers. The service sees masked integers, but no masks. Together they could see everything, so
the keeper must not be run by the operator of the service.
"""
