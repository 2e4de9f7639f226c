//! Checkpoints on a web server, on Google's and on Microsoft's object stores: a folder served on loopback in all three ways,
//! read-only, so that addresses, requests and errors are those of the real clients.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use crate::command::{Ran, case, fine, ran, reshard};
use crate::conversions::copy;

const DATE: &str = "Wed, 21 Oct 2015 07:28:00 GMT";

/// Serves a folder until the process ends; gives the server's address.
fn serve(folder: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let folder = folder.clone();
            std::thread::spawn(move || while answer(socket.as_ref().unwrap(), &folder).is_some() {});
        }
    });
    server
}

/// Answers one request; `None` at the end of the connection.
fn answer(mut socket: &TcpStream, folder: &Path) -> Option<()> {
    let mut lines = BufReader::new(socket).lines();
    let first = lines.next()?.ok()?;
    let mut range = None;
    for line in lines {
        let line = line.ok()?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(text) = line.strip_prefix("range: bytes=").or_else(|| line.strip_prefix("x-ms-range: bytes=")) {
            let (start, end) = text.split_once('-')?;
            range = Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()?));
        }
    }
    let mut words = first.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let path = folder.join(decoded(path).trim_matches('/').replace("devstoreaccount1/", ""));
    let (status, body) = match method {
        "GET" if query.contains("list-type=2") => ("200 OK", google_list(&path, query)),
        "GET" if query.contains("comp=list") => ("200 OK", azure_list(&path, query)),
        "GET" | "HEAD" => match std::fs::read(&path) {
            Ok(content) => ("200 OK", content),
            Err(_) => ("404 Not Found", Vec::new()),
        },
        _ => ("405 Method Not Allowed", Vec::new()),
    };
    let total = body.len();
    let (status, part, extra) = match range.filter(|_| status == "200 OK" && method == "GET") {
        Some((start, end)) => {
            let end = end.min(total.saturating_sub(1));
            ("206 Partial Content", &body[start..=end], format!("Content-Range: bytes {start}-{end}/{total}\r\n"))
        }
        None => (status, body.as_slice(), String::new()),
    };
    let head = format!("HTTP/1.1 {status}\r\nLast-Modified: {DATE}\r\nETag: \"one\"\r\nx-ms-version: 2023-11-03\r\n");
    // In one piece: a head by itself waits for the client's acknowledgement before the body follows.
    let mut reply = format!("{head}{extra}Content-Length: {}\r\n\r\n", part.len()).into_bytes();
    if method != "HEAD" {
        reply.extend_from_slice(part);
    }
    socket.write_all(&reply).ok()
}

/// Without percent-encoding: every client has its own idea of what needs it.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).unwrap()
}

/// The files below a bucket whose names start with the prefix of a query, with their sizes.
fn listed(bucket: &Path, query: &str) -> Vec<(String, u64)> {
    let prefix = query.split('&').find_map(|pair| pair.strip_prefix("prefix=")).unwrap_or("");
    let prefix = decoded(prefix);
    let mut found = Vec::new();
    let mut folders = vec![bucket.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(bucket).unwrap().to_str().unwrap().to_owned();
            match path.is_dir() {
                true => folders.push(path),
                false if name.starts_with(&prefix) => found.push((name, path.metadata().unwrap().len())),
                false => {}
            }
        }
    }
    found.sort();
    found
}

fn google_list(bucket: &Path, query: &str) -> Vec<u8> {
    let item = |(name, size): (String, u64)| {
        format!(
            "<Contents><Key>{name}</Key><Size>{size}</Size><LastModified>2015-10-21T07:28:00.000Z</LastModified>\
             <ETag>\"one\"</ETag></Contents>"
        )
    };
    let items: String = listed(bucket, query).into_iter().map(item).collect();
    format!("<?xml version=\"1.0\"?><ListBucketResult>{items}</ListBucketResult>").into_bytes()
}

fn azure_list(container: &Path, query: &str) -> Vec<u8> {
    let item = |(name, size): (String, u64)| {
        format!(
            "<Blob><Name>{name}</Name><Properties><Last-Modified>{DATE}</Last-Modified><Etag>one</Etag>\
             <Content-Length>{size}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
        )
    };
    let items: String = listed(container, query).into_iter().map(item).collect();
    format!("<?xml version=\"1.0\"?><EnumerationResults><Blobs>{items}</Blobs><NextMarker/></EnumerationResults>").into_bytes()
}

/// One of the three ways: the address of the folder `runs`, and what the environment must say.
struct Way {
    at: String,
    environment: Vec<(&'static str, String)>,
}

fn ways(server: &str) -> Vec<Way> {
    let say = |pairs: &[(&'static str, &str)]| pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    vec![
        Way { at: format!("{server}/bucket/runs"), environment: Vec::new() },
        Way {
            at: "gs://bucket/runs".to_owned(),
            environment: say(&[("GOOGLE_BASE_URL", server), ("GOOGLE_SKIP_SIGNATURE", "true"), ("GOOGLE_ALLOW_HTTP", "true")]),
        },
        Way {
            at: "az://bucket/runs".to_owned(),
            environment: say(&[
                ("AZURITE_BLOB_STORAGE_URL", server),
                ("AZURE_STORAGE_USE_EMULATOR", "true"),
                ("AZURE_ALLOW_HTTP", "true"),
            ]),
        },
    ]
}

impl Way {
    fn run(&self, args: &[&str]) -> Ran {
        let ran = ran(&reshard(args).envs(self.environment.iter().map(|(n, v)| (n, v))).output().unwrap());
        assert!(!ran.stderr.contains("panicked"), "{args:?}\n{ran}");
        ran
    }

    fn fine(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{args:?}\n{ran}");
        ran.stdout
    }
}

#[test]
fn checkpoints_are_read_from_the_web_and_from_every_cloud() {
    let folder = tempfile::tempdir().unwrap();
    let source = case("torch-2.13/fsdp2_w3");
    let runs = folder.path().join("bucket/runs");
    copy(&source, runs.join("step_1").to_str().unwrap());
    fine(&["convert", &source, runs.join("model.safetensors").to_str().unwrap(), "--model-only"]);
    fine(&["convert", &source, runs.join("all.pt").to_str().unwrap()]);
    let digest = fine(&["digest", &source]);
    let model = fine(&["digest", runs.join("model.safetensors").to_str().unwrap()]);
    for way in ways(&serve(folder.path().to_owned())) {
        let at = |name: &str| format!("{}/{name}", way.at);
        assert_eq!(way.fine(&["digest", &at("step_1")]), digest, "{}", way.at);
        assert_eq!(way.fine(&["digest", &at("model.safetensors")]), model, "{}", way.at);
        let shown = way.fine(&["inspect", &at("step_1")]);
        assert!(shown.contains("written by torch.distributed.checkpoint") && shown.contains("3 ranks"), "{shown}");
        way.fine(&["ls", &at("all.pt")]);
        way.fine(&["verify", &at("step_1")]);
        way.fine(&["diff", &source, &at("all.pt")]);
        let local = tempfile::tempdir().unwrap();
        let to = local.path().join("dcp").to_str().unwrap().to_owned();
        way.fine(&["convert", &at("step_1"), &to, "--to", "dcp", "--ranks", "2"]);
        fine(&["diff", &source, &to]);
    }
}

#[test]
fn what_is_not_there_or_cannot_be_written_is_told() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bucket")).unwrap();
    for way in ways(&serve(folder.path().to_owned())) {
        let missing = way.run(&["inspect", &format!("{}/nothing.pt", way.at)]);
        assert!(missing.code == 2 && missing.stderr.starts_with("error: ") && missing.stderr.contains(&way.at), "{missing}");
        let nowhere = way.run(&["inspect", &way.at]);
        assert!(nowhere.code == 2 && nowhere.stderr.starts_with("error: ") && nowhere.stderr.contains(&way.at), "{nowhere}");
        let written = way.run(&["convert", &case("torch-2.13/zoo"), &format!("{}/x.pt", way.at)]);
        assert!(written.code == 2 && written.stderr.contains("caused by: "), "{written}");
    }
}
