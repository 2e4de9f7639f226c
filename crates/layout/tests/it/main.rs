//! Property tests against brute force, and fixtures made by PyTorch.
