//! The engine's tests: whole saves and loads.

mod around;
mod asynchronous;
mod corpus;
mod crashes;
mod digests;
mod layouts;
mod round_trip;
mod verifying;
mod converting;
mod relayouts;
mod around_files;
mod comparing;
mod ordered;
