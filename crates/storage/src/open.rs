//! The one function that turns an address into a store.

use std::sync::Arc;

use crate::local::LocalStore;
use crate::memory::MemoryStore;
use crate::{Address, Result, Scheme, StorageError, Store, StoreOptions};

/// Opens the store rooted at an address. Nothing is created, and on object stores nothing is asked, until used.
pub fn open(address: &Address, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    match address.scheme() {
        Scheme::File => {
            let path = address
                .local_path()
                .ok_or_else(|| StorageError::BadAddress { address: address.to_string(), reason: "it has no path".to_owned() })?;
            Ok(Arc::new(LocalStore::new(path, options)?))
        }
        Scheme::Memory => Ok(Arc::new(MemoryStore::shared(address.authority(), address.key()))),
        #[cfg(feature = "object")]
        _ => Ok(Arc::new(crate::object::ObjectBackend::open(address, options)?)),
        #[cfg(not(feature = "object"))]
        _ => Err(StorageError::NotBuilt { path: address.to_string(), scheme: "object stores".to_owned() }),
    }
}
