//! Settings of a store.

use std::time::Duration;

/// How often and how long a failed request to an object store is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// At most so many tries after the first.
    pub max_retries: usize,
    /// At most so long after the first try.
    pub timeout: Duration,
    /// The first pause; each next one is longer, with jitter.
    pub first_backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
}

impl Default for Retry {
    fn default() -> Retry {
        Retry {
            max_retries: 10,
            timeout: Duration::from_secs(180),
            first_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(15),
        }
    }
}

/// Settings of a store. What is not set here is taken from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Bypass the page cache on local files, where the file system allows it.
    pub direct_io: bool,
    /// Reserve the space of a file whose length is known before writing it.
    pub preallocate: bool,
    /// Start writing to the device while a file is still being written, so that its sync at the end is short.
    pub early_writeback: bool,
    /// Let symbolic links inside a local root lead outside of it (the Hugging Face cache is made of such links).
    pub follow_symlinks: bool,
    /// How many bytes of one file may be on their way to an object store at once.
    pub upload_budget: u64,
    /// The size of one part of an upload; parts grow by themselves when a file would need more than 10,000.
    pub part_size: u64,
    /// Two wanted ranges of an object become one request when at most so many unwanted bytes lie between them.
    pub coalesce_gap: u64,
    /// How many requests for parts of objects run at once, of all readers of the store together.
    pub read_concurrency: usize,
    /// Trying again.
    pub retry: Retry,
    /// Where the object store is, instead of the provider's own address (`AWS_ENDPOINT_URL`).
    pub endpoint: Option<String>,
    /// Whether plain `http://` is fine (`AWS_ALLOW_HTTP`); on by itself for an endpoint on loopback.
    pub allow_http: Option<bool>,
    /// The region (`AWS_REGION`).
    pub region: Option<String>,
    /// Any other setting by the object store client's own name, such as `aws_access_key_id`.
    pub settings: Vec<(String, String)>,
}

impl Default for StoreOptions {
    fn default() -> StoreOptions {
        StoreOptions {
            direct_io: false,
            preallocate: true,
            early_writeback: true,
            follow_symlinks: false,
            upload_budget: 64 << 20,
            part_size: 8 << 20,
            coalesce_gap: 1 << 20,
            read_concurrency: 32,
            retry: Retry::default(),
            endpoint: None,
            allow_http: None,
            region: None,
            settings: Vec::new(),
        }
    }
}
