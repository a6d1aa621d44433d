"""Lower bounds: what no plan of a part of the space can be faster than."""
