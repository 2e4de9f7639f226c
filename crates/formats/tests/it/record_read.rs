//! Archives that torch wrote.
