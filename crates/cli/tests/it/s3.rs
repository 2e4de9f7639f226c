//! Checkpoints on an object store: a real S3 server on loopback.

use crate::command::{Ran, case, fine, ran, reshard, snapshot, sorted_entries};
use crate::server::{BUCKET, Server};

/// What the command needs to know to find it.
fn environment(server: &Server) -> [(&'static str, String); 5] {
    [
        ("AWS_ENDPOINT_URL", server.endpoint.clone()),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", "key".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
    ]
}

fn run(server: &Server, args: &[&str]) -> Ran {
    let ran = ran(&reshard(args).envs(environment(server)).output().unwrap());
    assert!(!ran.stderr.contains("panicked"), "{ran}");
    ran
}

#[test]
fn every_kind_of_work_happens_there_too() {
    let server = Server::start();
    let at = |name: &str| format!("s3://{BUCKET}/runs/{name}");
    let source = case("torch-2.13/fsdp2_w3");
    let fine_there = |args: &[&str]| {
        let ran = run(&server, args);
        assert_eq!(ran.code, 0, "{args:?}\n{ran}");
        ran.stdout
    };
    fine_there(&["convert", &source, &at("step_1"), "--to", "dcp", "--ranks", "2"]);
    snapshot("s3_inspect", None, &run(&server, &["inspect", &at("step_1")]));
    fine_there(&["verify", &at("step_1")]);
    fine_there(&["diff", &source, &at("step_1")]);
    assert_eq!(sorted_entries(&fine_there(&["digest", &at("step_1")])), sorted_entries(&fine(&["digest", &source])));
    fine_there(&["convert", &at("step_1"), &at("model.safetensors"), "--model-only"]);
    fine_there(&["convert", &at("step_1"), &at("step_2"), "--to", "dcp"]);
    fine_there(&["edit", &at("step_1"), &at("step_3"), "--set", "step=7"]);
    assert_eq!(fine_there(&["show", &at("step_3"), "step"]), "7\n");
    assert_eq!(fine_there(&["latest", &format!("s3://{BUCKET}/runs")]).trim(), at("step_3"));
    fine_there(&["prune", &format!("s3://{BUCKET}/runs"), "--keep-last", "1"]);
    let gone = run(&server, &["inspect", &at("step_1")]);
    assert!(gone.code == 2 && gone.stderr.contains("no checkpoint at s3://"), "{gone}");
    fine_there(&["ls", &at("model.safetensors")]);
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let output = reshard(&["inspect", "s3://bucket/x"])
        .envs([("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), ("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "x")])
        .envs([("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_MAX_RETRIES", "0")])
        .output()
        .unwrap();
    let ran = ran(&output);
    assert!(ran.code == 2 && ran.stderr.starts_with("error: ") && ran.stderr.contains("caused by: "), "{ran}");
}
