//! A real S3 server on loopback, over a temporary folder.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper::{Method, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use reshard_storage::{Retry, StoreOptions};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "bucket";

pub(crate) struct Server {
    pub(crate) endpoint: String,
    pub(crate) folder: tempfile::TempDir,
    _runtime: Runtime,
}

impl Server {
    pub(crate) fn start() -> Server {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let files = s3s_fs::FileSystem::new(folder.path()).unwrap();
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single("key", "secret"));
        let service = service.build();

        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        // The server looks whether an object is there and then writes it. S3 does both in one step, so here one writes at a time.
        let writing = Arc::new(tokio::sync::Mutex::new(()));
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (service, writing) = (service.clone(), Arc::clone(&writing));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (service, writing) = (service.clone(), Arc::clone(&writing));
                    async move {
                        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
                        let _turn = if reads { None } else { Some(writing.lock().await) };
                        Service::call(&service, request).await
                    }
                });
                tokio::spawn(async move {
                    let http = Builder::new(TokioExecutor::new());
                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Server { endpoint, folder, _runtime: runtime }
    }

    pub(crate) fn options(&self) -> StoreOptions {
        let setting = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        StoreOptions {
            endpoint: Some(self.endpoint.clone()),
            region: Some("us-east-1".to_owned()),
            part_size: 5 << 20,
            upload_budget: 12 << 20,
            retry: Retry { max_retries: 2, ..Retry::default() },
            settings: vec![setting("aws_access_key_id", "key"), setting("aws_secret_access_key", "secret")],
            ..StoreOptions::default()
        }
    }
}
