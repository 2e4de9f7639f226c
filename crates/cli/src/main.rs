//! The `reshard` command line.

fn main() {}
