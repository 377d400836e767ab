"""NumPy golden operations, one file an operation, with the names and signatures of the GPU launchers."""
