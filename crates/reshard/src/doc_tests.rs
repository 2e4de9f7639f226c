//! Runs the Rust code blocks of the README and of docs/ as documentation tests. Compiled for those only.

macro_rules! pages {
    ($($name:ident = $path:literal),* $(,)?) => {
        $(#[doc = include_str!($path)] mod $name {})*
    };
}

pages! {
    readme = "../../../README.md",
    quick_start_rust = "../../../docs/quick-start-rust.md",
    reading_in_rust = "../../../docs/reading-in-rust.md",
    groups = "../../../docs/groups.md",
    layouts = "../../../docs/layouts.md",
    format = "../../../docs/format.md",
    object_stores = "../../../docs/object-stores.md",
    optimizer_state = "../../../docs/optimizer-state.md",
    reliability = "../../../docs/reliability.md",
    scaling = "../../../docs/scaling.md",
}
