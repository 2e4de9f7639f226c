//! A real S3 server on loopback over a folder, for measurements and for trying things: each folder in it is a bucket.
//!
//! Prints its endpoint and runs until its input ends.
//!
//! ```text
//! cargo run --release -p reshard-storage --example s3_server -- FOLDER KEY SECRET
//! ```
use std::error::Error;
use std::io::Read;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, key, secret] = arguments.as_slice() else {
        return Err("give a folder, a key and a secret".into());
    };
    let files = s3s_fs::FileSystem::new(folder).map_err(|error| format!("{folder}: {error:?}"))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single(key.as_str(), secret.as_str()));
    let service = service.build();

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    println!("http://{}", listener.local_addr()?);
    runtime.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let http = Builder::new(TokioExecutor::new());
                // A connection that breaks is the client's affair.
                let _ = http.serve_connection(TokioIo::new(socket), service).await;
            });
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
