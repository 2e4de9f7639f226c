//! A small HTTP server for one reader: the page at `/`, one tensor at `/api/tensor?key=…`, the scan of all at `/api/numbers`.
//!
//! It listens on 127.0.0.1 alone, answers only requests that name it as their host (so a web page elsewhere cannot reach it
//! by pointing its own name here), takes only GET and HEAD, and bounds the size, the time and the number of requests.
//! Every connection carries one request. It is written on `std::net`: three routes do not earn a framework.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::data::{ReportData, TensorDetail};
use super::health::Scan;
use super::render::{RenderError, render};
use http::{Answer, Head, Request, query_value};

mod http;

/// What the server asks for a tensor.
pub trait LiveSource: Send + Sync {
    /// Looks at one tensor; the error is a message for the reader of the page.
    fn tensor(&self, key: &str) -> Result<TensorDetail, String>;

    /// How far the scan of all numbers is, or what it found.
    fn numbers(&self) -> Scan<'_> {
        Scan::Off
    }
}

/// Bounds of the server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The port; 0 takes any that is free.
    pub port: u16,
    /// Longest request head taken.
    pub request_limit: usize,
    /// Longest time for a request to arrive, and for each write of its answer.
    pub timeout: Duration,
    /// Most requests at once; one more is told to come back.
    pub connections: usize,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { port: 0, request_limit: 64 << 10, timeout: Duration::from_secs(10), connections: 32 }
    }
}

/// Why the server could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The port could not be had.
    #[error("cannot listen on 127.0.0.1:{port}")]
    Listen {
        /// The port asked for.
        port: u16,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The page could not be made.
    #[error("cannot make the page")]
    Page(#[source] RenderError),
}

/// A server that listens and, once [run](Server::run), answers.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    page: String,
    source: Arc<dyn LiveSource>,
    options: ServeOptions,
    port: u16,
    stopping: AtomicBool,
    active: Mutex<usize>,
    done: Condvar,
}

/// Stops a [`Server`] from another thread.
#[derive(Clone)]
pub struct StopHandle {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl StopHandle {
    /// Lets requests under way finish, takes no more, and makes [`Server::run`] return.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // `accept` cannot be interrupted: a connection wakes it. If that fails, nobody is accepting.
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
    }
}

impl Server {
    /// Listens on loopback; connections wait until [`run`](Server::run).
    pub fn bind(data: &ReportData, source: Arc<dyn LiveSource>, options: ServeOptions) -> Result<Self, ServeError> {
        let page = if data.live { render(data) } else { render(&ReportData { live: true, ..data.clone() }) }
            .map_err(ServeError::Page)?;
        let listen = |source| ServeError::Listen { port: options.port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port)).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let shared = Arc::new(Shared {
            page,
            source,
            port: address.port(),
            options,
            stopping: AtomicBool::new(false),
            active: Mutex::new(0),
            done: Condvar::new(),
        });
        Ok(Self { listener, address, shared })
    }

    /// Where the page is.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// What stops this server.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle { shared: Arc::clone(&self.shared), address: self.address }
    }

    /// Answers requests until stopped; returns when the last one under way is answered.
    pub fn run(self) {
        while !self.shared.stopping.load(Ordering::SeqCst) {
            let Ok((stream, _)) = self.listener.accept() else {
                // Out of descriptors, or the peer left first: neither is a reason to end, nor to spin.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            if self.shared.stopping.load(Ordering::SeqCst) {
                break;
            }
            let Some(turn) = Turn::take(&self.shared) else {
                drop(answer_busy(stream, &self.shared.options));
                continue;
            };
            let spawned = std::thread::Builder::new()
                .name("report request".to_owned())
                // A reader that left is no concern of the server's.
                .spawn(move || drop(turn.0.answer(stream)));
            // Without a thread the connection closes; the page says that the server did not answer.
            drop(spawned);
        }
        let mut active = self.shared.active.lock().unwrap_or_else(PoisonError::into_inner);
        while *active > 0 {
            active = self.shared.done.wait(active).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One of the connections that may be open at once; given back when dropped, even by a panic.
struct Turn(Arc<Shared>);

impl Turn {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let mut active = shared.active.lock().unwrap_or_else(PoisonError::into_inner);
        if *active >= shared.options.connections {
            return None;
        }
        *active += 1;
        Some(Self(Arc::clone(shared)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut active = self.0.active.lock().unwrap_or_else(PoisonError::into_inner);
        *active = active.saturating_sub(1);
        self.0.done.notify_all();
    }
}

impl Shared {
    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_write_timeout(Some(self.options.timeout))?;
        stream.set_nodelay(true)?;
        let answer = match Head::read(&mut stream, self.options.request_limit, self.options.timeout, &self.stopping)? {
            Head::Whole(head) => self.route(&head),
            Head::TooLong => Answer::error(431, "the request is too long"),
            Head::Late => Answer::error(408, "the request took too long"),
            Head::Closed => return Ok(()),
        };
        answer.write(&mut stream)?;
        finish(stream)
    }

    fn route(&self, head: &[u8]) -> Answer {
        let Some(request) = Request::parse(head) else {
            return Answer::error(400, "this is not an HTTP request");
        };
        if !self.is_own_host(request.host) {
            return Answer::error(421, "this server answers only to its own loopback address");
        }
        let body = match request.method {
            "GET" => true,
            "HEAD" => false,
            _ => return Answer::error(405, "only GET and HEAD are answered").with_allow(),
        };
        let (path, query) = request.target.split_once('?').unwrap_or((request.target, ""));
        let answer = match path {
            "/" => Answer::page(self.page.clone()),
            // A page elsewhere must not even be able to make this server read a tensor.
            "/api/tensor" | "/api/numbers" if matches!(request.fetch_site, Some("cross-site" | "same-site")) => {
                Answer::error(403, "only this server's own page may ask")
            }
            "/api/tensor" => match query_value(query, "key") {
                None => Answer::error(400, "the key is missing, or is not UTF-8"),
                Some(key) => match self.source.tensor(&key) {
                    Ok(detail) => Answer::json(200, &detail),
                    Err(message) => Answer::error(404, &message),
                },
            },
            "/api/numbers" => Answer::json(200, &self.source.numbers()),
            _ => Answer::error(404, "not found"),
        };
        if body { answer } else { answer.without_body() }
    }

    fn is_own_host(&self, host: Option<&str>) -> bool {
        let Some((name, port)) = host.and_then(|host| host.rsplit_once(':')) else {
            return self.port == 80 && matches!(host, Some("127.0.0.1" | "localhost"));
        };
        (name == "127.0.0.1" || name.eq_ignore_ascii_case("localhost")) && port.parse() == Ok(self.port)
    }
}

fn answer_busy(mut stream: TcpStream, options: &ServeOptions) -> io::Result<()> {
    // This runs where connections are accepted, so it may take only a moment.
    let moment = Duration::from_millis(50);
    stream.set_write_timeout(Some(options.timeout.min(moment)))?;
    stream.set_read_timeout(Some(moment))?;
    // A connection closed with unread input is reset, and the answer lost.
    let _unused = stream.read(&mut [0_u8; 8192])?;
    Answer::error(503, "too many requests at once").write(&mut stream)?;
    stream.shutdown(std::net::Shutdown::Write)
}

/// Closing with unread input makes some systems throw the answer away: say that it is over, then drain for a moment.
fn finish(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown(std::net::Shutdown::Write)?;
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut part = [0_u8; 4096];
    for _ in 0..64 {
        if stream.read(&mut part)? == 0 {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Instant;

    use super::*;

    struct Echo;

    static SLOW_IS_ASKED: AtomicBool = AtomicBool::new(false);

    impl LiveSource for Echo {
        fn tensor(&self, key: &str) -> Result<TensorDetail, String> {
            match key {
                "missing" => Err(format!("{key} does not exist")),
                "panic" => panic!("a source may fail badly"),
                "slow" => {
                    SLOW_IS_ASKED.store(true, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(300));
                    Ok(TensorDetail { key: key.to_owned(), ..TensorDetail::default() })
                }
                _ => Ok(TensorDetail { key: key.to_owned(), ..TensorDetail::default() }),
            }
        }
    }

    fn with_server<T>(options: ServeOptions, test: impl FnOnce(u16, &StopHandle) -> T) -> T {
        let server = Server::bind(&ReportData::default(), Arc::new(Echo), options).unwrap();
        let (handle, port) = (server.stop_handle(), server.address.port());
        let running = std::thread::spawn(move || server.run());
        let result = test(port, &handle);
        handle.stop();
        running.join().unwrap();
        result
    }

    fn send(port: u16, request: &str) -> String {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(port: u16, target: &str) -> String {
        send(port, &format!("GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"))
    }

    #[test]
    fn the_page_and_a_tensor_are_served() {
        with_server(ServeOptions::default(), |port, _| {
            let page = get(port, "/");
            assert!(page.starts_with("HTTP/1.1 200 OK\r\n"));
            assert!(page.contains("Content-Security-Policy: default-src 'none'"));
            assert!(page.contains("\"live\":true"));
            let tensor = get(port, "/api/tensor?a=1&key=model.%C3%A9+%2B%26%3D");
            assert!(tensor.ends_with("\r\n\r\n{\"key\":\"model.é +&=\"}"), "{tensor}");
            assert!(get(port, "/api/tensor?key=missing").contains("404 Not Found"));
            assert!(get(port, "/api/tensor?key=missing").ends_with("{\"error\":\"missing does not exist\"}"));
            assert!(get(port, "/api/numbers").ends_with("\r\n\r\n{\"state\":\"off\"}"));
            assert!(get(port, "/api/tensor").contains(" 400 "));
            assert!(get(port, "/api/tensor?key=%zz").contains(" 400 "));
            assert!(get(port, "/api/tensor?key=%ff").contains(" 400 "));
            assert!(get(port, "/../etc/passwd").contains(" 404 "));
        });
    }

    #[test]
    fn only_its_own_host_is_answered() {
        with_server(ServeOptions::default(), |port, _| {
            for host in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1", "127.0.0.1:1", ""] {
                let answer = send(port, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
                assert!(answer.starts_with("HTTP/1.1 421 "), "{host}: {answer}");
            }
            assert!(send(port, "GET / HTTP/1.1\r\n\r\n").contains(" 421 "));
            let twice = format!("GET / HTTP/1.1\r\nHost: localhost:{port}\r\nHost: evil\r\n\r\n");
            assert!(send(port, &twice).contains(" 400 "));
            let own = format!("GET / HTTP/1.1\r\nhost: LocalHost:{port}\r\n\r\n");
            assert!(send(port, &own).contains(" 200 "));
            let foreign =
                format!("GET /api/tensor?key=a HTTP/1.1\r\nHost: localhost:{port}\r\nSec-Fetch-Site: cross-site\r\n\r\n");
            assert!(send(port, &foreign).contains(" 403 "));
        });
    }

    #[test]
    fn other_methods_and_nonsense_are_refused() {
        with_server(ServeOptions::default(), |port, _| {
            let post = send(port, &format!("POST / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"));
            assert!(post.contains(" 405 ") && post.contains("Allow: GET, HEAD"));
            assert!(send(port, "nonsense\r\n\r\n").contains(" 400 "));
            let head = send(port, &format!("HEAD / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"));
            assert!(head.contains(" 200 ") && head.ends_with("\r\n\r\n"));
        });
    }

    #[test]
    fn long_and_slow_requests_end() {
        let options = ServeOptions { request_limit: 8192, timeout: Duration::from_millis(200), ..ServeOptions::default() };
        with_server(options, |port, _| {
            let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(9000));
            assert!(send(port, &long).contains(" 431 "));
            let start = Instant::now();
            assert!(send(port, "GET / HT").contains(" 408 "));
            assert!(start.elapsed() < ServeOptions::default().timeout);
        });
    }

    #[test]
    fn one_request_too_many_is_told_so() {
        let options = ServeOptions { connections: 1, ..ServeOptions::default() };
        with_server(options, |port, _| {
            let idle = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            // Accepted in order of arrival, so the idle connection has the one turn.
            assert!(get(port, "/").contains(" 503 "));
            drop(idle);
        });
    }

    #[test]
    fn a_panicking_source_costs_one_answer_only() {
        with_server(ServeOptions { connections: 1, ..ServeOptions::default() }, |port, _| {
            assert_eq!(get(port, "/api/tensor?key=panic"), "");
            let deadline = Instant::now() + Duration::from_secs(30);
            while !get(port, "/").contains(" 200 ") {
                assert!(Instant::now() < deadline, "the turn was not given back");
            }
        });
    }

    #[test]
    fn stopping_waits_for_what_is_under_way() {
        with_server(ServeOptions::default(), |port, handle| {
            let asking = std::thread::spawn(move || get(port, "/api/tensor?key=slow"));
            while !SLOW_IS_ASKED.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            handle.stop();
            assert!(asking.join().unwrap().contains(" 200 "));
        });
    }

    #[test]
    fn an_idle_connection_does_not_hold_up_the_end() {
        let start = with_server(ServeOptions::default(), |port, _| {
            let idle = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            assert!(get(port, "/").contains(" 200 "));
            (idle, Instant::now())
        });
        assert!(start.1.elapsed() < ServeOptions::default().timeout);
    }
}
