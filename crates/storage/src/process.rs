//! Values of which every process has its own.
//!
//! A fork copies all memory and one thread. A lock that another thread held then stays locked in the child for ever, a pool has none of
//! its threads, and a connection has nobody who waits for its answers. So what is shared within a process is made anew by a child.

use std::sync::OnceLock;

/// A value that is made once in every process that asks for it.
#[derive(Debug)]
pub struct PerProcess<T> {
    first: OnceLock<Box<Own<T>>>,
}

/// What one process made, and where those forked from it look on.
#[derive(Debug)]
struct Own<T> {
    process: u32,
    value: T,
    next: OnceLock<Box<Own<T>>>,
}

impl<T> PerProcess<T> {
    /// Nothing is made yet.
    pub const fn new() -> PerProcess<T> {
        PerProcess { first: OnceLock::new() }
    }

    /// This process's value. `make` may run on several threads at once, of which one wins.
    pub fn get(&self, make: impl Fn() -> T) -> &T {
        match self.get_or_try(|| Ok::<T, std::convert::Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// This process's value, or why it could not be made.
    pub fn get_or_try<E>(&self, make: impl Fn() -> Result<T, E>) -> Result<&T, E> {
        let process = std::process::id();
        let mut cell = &self.first;
        loop {
            match cell.get() {
                Some(own) if own.process == process => return Ok(&own.value),
                Some(own) => cell = &own.next,
                None => {
                    // Made first and set then: nothing is locked meanwhile that a fork could leave locked.
                    let made = Own { process, value: make()?, next: OnceLock::new() };
                    // Whoever was faster has made one for this process as well.
                    let _ = cell.set(Box::new(made));
                }
            }
        }
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_process_makes_one_and_tries_again_after_an_error() {
        let cell = PerProcess::new();
        assert_eq!(cell.get_or_try(|| Err::<u32, &str>("not now")), Err("not now"));
        assert_eq!(*cell.get(|| 1), 1);
        assert_eq!(*cell.get(|| 2), 1);
    }

    #[test]
    fn what_another_process_made_is_passed_over() {
        let cell = PerProcess::new();
        let theirs = Own { process: std::process::id().wrapping_add(1), value: 1, next: OnceLock::new() };
        assert!(cell.first.set(Box::new(theirs)).is_ok());
        assert_eq!(*cell.get(|| 2), 2);
        assert_eq!(*cell.get(|| 3), 2);
    }

    #[test]
    fn threads_agree_on_one() {
        let (cell, made) = (PerProcess::new(), AtomicUsize::new(0));
        let seen: Vec<usize> = std::thread::scope(|scope| {
            let one = || *cell.get(|| made.fetch_add(1, Ordering::Relaxed));
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(seen.iter().all(|value| value == &seen[0]));
    }
}
