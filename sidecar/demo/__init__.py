"""`kvlake demo`: hits from host memory and object stores, with a small model made on the spot."""
