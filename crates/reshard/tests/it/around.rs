//! What the engine promises around a save: refusing to overwrite, replacing whole, leaving nothing behind.
