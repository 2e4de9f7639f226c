//! A plain web server that knows `HEAD` and `GET` with ranges is enough to read a checkpoint from.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use reshard_storage::{Address, RangeRead, StorageError, StoreOptions, WriteOptions, open};

const PATH: &str = "/runs/step_1/file";

/// Serves `content` at [`PATH`] until the process ends; gives the server's address.
fn serve(content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let content = content.clone();
            std::thread::spawn(move || while answer(socket.as_ref().unwrap(), &content).is_some() {});
        }
    });
    server
}

/// Answers one request; `None` at the end of the connection.
fn answer(mut socket: &TcpStream, content: &[u8]) -> Option<()> {
    let mut lines = BufReader::new(socket).lines();
    let first = lines.next()?.ok()?;
    let mut range = None;
    for line in lines {
        let line = line.ok()?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(text) = line.strip_prefix("range: bytes=") {
            let (start, end) = text.split_once('-')?;
            range = Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()?));
        }
    }
    let mut words = first.split(' ');
    let (method, path) = (words.next()?, words.next()?);
    let last_modified = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT";
    let (head, body) = match range {
        _ if path != PATH => ("HTTP/1.1 404 Not Found".to_owned(), &[][..]),
        Some((start, end)) => {
            let total = content.len();
            let head = format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{end}/{total}");
            (head, content.get(start..=end)?)
        }
        None => ("HTTP/1.1 200 OK".to_owned(), content),
    };
    write!(socket, "{head}\r\n{last_modified}\r\nContent-Length: {}\r\n\r\n", body.len()).ok()?;
    if method == "GET" {
        socket.write_all(body).ok()?;
    }
    Some(())
}

#[test]
fn files_of_a_web_server_are_read_by_ranges() {
    let content: Vec<u8> = (0..100_000_u32).map(|index| (index % 251) as u8).collect();
    let server = serve(content.clone());
    let address = Address::parse(&format!("{server}/runs/step_1")).unwrap();
    let store = open(&address, &StoreOptions::default()).unwrap();
    assert_eq!(store.size("file").unwrap(), 100_000);
    assert_eq!(store.read("file", 1 << 20).unwrap(), content);
    assert!(store.read("missing", 1).unwrap_err().is_not_found());
    let reader = store.open_reader("file").unwrap();
    let (mut one, mut two) = ([0; 10], [0; 5_000]);
    let mut ranges = [RangeRead { offset: 99_990, buf: &mut one }, RangeRead { offset: 3, buf: &mut two }];
    reader.read_ranges(&mut ranges).unwrap();
    assert_eq!(one, content[99_990..]);
    assert_eq!(two, content[3..5_003]);
}

#[test]
fn a_web_server_takes_no_parts() {
    let server = serve(Vec::new());
    let options = StoreOptions { upload_budget: 1000, ..StoreOptions::default() };
    let store = open(&Address::parse(&server).unwrap(), &options).unwrap();
    let writer = store.create_writer("new", &WriteOptions::default()).unwrap();
    let error = writer.write_at(0, &[std::io::IoSlice::new(&[0; 2000])]).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
}
