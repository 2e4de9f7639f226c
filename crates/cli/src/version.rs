//! What this binary is: its version and the facts of its build.

#[cfg(feature = "cloud")]
macro_rules! stores {
    () => {
        "file, s3, gs, az, https"
    };
}

#[cfg(not(feature = "cloud"))]
macro_rules! stores {
    () => {
        "file"
    };
}

/// `0.1.0 (abc1234)`, for `-V`.
pub(crate) const SHORT: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("RESHARD_BUILD_COMMIT"), ")");

/// Every fact, for `--version`.
pub(crate) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit:   ",
    env!("RESHARD_BUILD_COMMIT"),
    "\ntarget:   ",
    env!("RESHARD_BUILD_TARGET"),
    "\nprofile:  ",
    env!("RESHARD_BUILD_PROFILE"),
    "\ncompiler: ",
    env!("RESHARD_BUILD_RUSTC"),
    "\nformats:  dcp, safetensors, torch",
    "\nstores:   ",
    stores!(),
);
