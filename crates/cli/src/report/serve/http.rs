//! As much of HTTP/1.1 as the report's server speaks: one request head in, one answer out.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::super::render::policy;

/// How often a connection that says nothing looks whether the server is stopping.
const GLANCE: Duration = Duration::from_millis(100);

fn is_no_input_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// What came of waiting for a request.
pub(super) enum Head {
    Whole(Vec<u8>),
    TooLong,
    Late,
    Closed,
}

impl Head {
    /// Reads up to the empty line. The deadline is for the whole head, so a trickle of bytes cannot hold a connection; and one
    /// that a browser opened in advance and never used does not hold up the server's end.
    pub(super) fn read(stream: &mut TcpStream, limit: usize, timeout: Duration, stopping: &AtomicBool) -> io::Result<Self> {
        let deadline = Instant::now() + timeout;
        let mut head = Vec::with_capacity(2048);
        let mut part = [0_u8; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Self::Late);
            }
            if head.is_empty() && stopping.load(Ordering::SeqCst) {
                return Ok(Self::Closed);
            }
            stream.set_read_timeout(Some(left.min(GLANCE)))?;
            let count = match stream.read(&mut part) {
                Ok(0) => return Ok(Self::Closed),
                Ok(count) => count,
                Err(error) if is_no_input_yet(&error) => continue,
                Err(error) => return Err(error),
            };
            let searched = head.len().saturating_sub(3);
            head.extend_from_slice(&part[..count]);
            if let Some(end) = head[searched..].windows(4).position(|four| four == b"\r\n\r\n") {
                head.truncate(searched + end);
                return Ok(Self::Whole(head));
            }
            if head.len() >= limit {
                return Ok(Self::TooLong);
            }
        }
    }
}

/// The parts of a request that matter here.
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) target: &'a str,
    pub(super) host: Option<&'a str>,
    pub(super) fetch_site: Option<&'a str>,
}

impl<'a> Request<'a> {
    pub(super) fn parse(head: &'a [u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(head).ok()?.split("\r\n");
        let mut words = lines.next()?.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if words.next().is_some() || !version.starts_with("HTTP/1.") || !target.starts_with('/') {
            return None;
        }
        let mut request = Self { method, target, host: None, fetch_site: None };
        for line in lines {
            let (name, value) = line.split_once(':')?;
            let value = Some(value.trim());
            if name.eq_ignore_ascii_case("host") {
                // Two hosts: whoever sent this wants them read differently by different readers.
                if request.host.is_some() {
                    return None;
                }
                request.host = value;
            } else if name.eq_ignore_ascii_case("sec-fetch-site") {
                request.fetch_site = value;
            }
        }
        Some(request)
    }
}

/// The value of a query's field, as forms write it.
pub(super) fn query_value(query: &str, field: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.split_once('=').filter(|(name, _)| *name == field))?.1;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let (high, low) = (char::from(rest.next()?), char::from(rest.next()?));
                u8::try_from(high.to_digit(16)? * 16 + low.to_digit(16)?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// An answer, ready to be written.
pub(super) struct Answer {
    status: u16,
    kind: &'static str,
    extra: String,
    length: usize,
    body: Vec<u8>,
}

impl Answer {
    fn new(status: u16, kind: &'static str, body: Vec<u8>) -> Self {
        Self { status, kind, extra: String::new(), length: body.len(), body }
    }

    pub(super) fn page(page: String) -> Self {
        let mut answer = Self::new(200, "text/html; charset=utf-8", page.into_bytes());
        answer.extra = format!("Content-Security-Policy: {}; frame-ancestors 'none'\r\nX-Frame-Options: DENY\r\n", policy(true));
        answer
    }

    pub(super) fn json(status: u16, value: &impl serde::Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self::new(status, "application/json", body),
            Err(_) => Self::new(500, "application/json", b"{\"error\":\"the answer is not JSON\"}".to_vec()),
        }
    }

    pub(super) fn error(status: u16, message: &str) -> Self {
        Self::json(status, &serde_json::json!({ "error": message }))
    }

    pub(super) fn with_allow(mut self) -> Self {
        self.extra.push_str("Allow: GET, HEAD\r\n");
        self
    }

    pub(super) fn without_body(mut self) -> Self {
        self.body.clear();
        self
    }

    pub(super) fn write(&self, stream: &mut TcpStream) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            421 => "Misdirected Request",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n{}\r\n",
            self.status, self.kind, self.length, self.extra
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&self.body)?;
        stream.flush()
    }
}
