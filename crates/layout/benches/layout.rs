//! Speed of the geometry.
fn main() {
    divan::main();
}
