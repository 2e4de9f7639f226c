//! A real S3 server on loopback, over a temporary folder.

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "bucket";

pub(crate) struct Server {
    pub(crate) endpoint: String,
    _folder: tempfile::TempDir,
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
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let http = Builder::new(TokioExecutor::new());
                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Server { endpoint, _folder: folder, _runtime: runtime }
    }

    /// What the command needs to know to find it.
    pub(crate) fn environment(&self) -> [(&'static str, String); 5] {
        [
            ("AWS_ENDPOINT_URL", self.endpoint.clone()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }
}
