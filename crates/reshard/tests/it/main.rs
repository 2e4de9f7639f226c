//! The engine's tests: whole saves and loads.

mod around;
mod asynchronous;
mod crashes;
mod layouts;
mod round_trip;
