"""Tables of the endpoints whose answer follows from the body of a POST alone, in the order of the API's description."""
