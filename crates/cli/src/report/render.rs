//! Joins the data with the page's markup, style and script into one file that needs nothing else.
//!
//! Two walls keep a hostile key from becoming markup: the JSON has every `<`, `>`, `&` and line separator escaped, and the
//! page's content security policy names the one style and the one script by their hashes. (The script is the third: it
//! puts text into the page as text only.)

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::data::ReportData;

const HTML: &str = include_str!("assets/report.html");
const CSS: &str = include_str!("assets/report.css");
const SCRIPT: &str = concat!(
    "(() => {\n'use strict';\n",
    include_str!("assets/js/core.js"),
    include_str!("assets/js/model.js"),
    include_str!("assets/js/health.js"),
    include_str!("assets/js/treemap.js"),
    include_str!("assets/js/rows.js"),
    include_str!("assets/js/picture.js"),
    include_str!("assets/js/values.js"),
    include_str!("assets/js/detail.js"),
    include_str!("assets/js/tensors.js"),
    include_str!("assets/js/charts.js"),
    include_str!("assets/js/diff.js"),
    include_str!("assets/js/strip.js"),
    include_str!("assets/js/optimizer.js"),
    include_str!("assets/js/main.js"),
    "})();\n"
);

/// Why a page could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// The data could not be written as JSON.
    #[error("cannot write the report's data as JSON")]
    Json(#[source] serde_json::Error),
}

/// The whole page.
pub fn render(data: &ReportData) -> Result<String, RenderError> {
    let json = script_safe_json(data)?;
    let title = escape_text(&data.checkpoint.name);
    let policy = policy(data.live);
    let mut page = String::with_capacity(HTML.len() + CSS.len() + SCRIPT.len() + json.len() + policy.len() + 64);
    // One pass over the markup, so that a placeholder inside the data is just text.
    let mut rest = HTML;
    while let Some((before, after)) = rest.split_once("{{") {
        page.push_str(before);
        let Some((name, after)) = after.split_once("}}") else {
            rest = after;
            break;
        };
        match name {
            "title" => page.push_str(&title),
            "policy" => page.push_str(&policy),
            "style" => page.push_str(CSS),
            "script" => page.push_str(SCRIPT),
            "data" => page.push_str(&json),
            _ => {}
        }
        rest = after;
    }
    page.push_str(rest);
    Ok(page)
}

/// The content security policy of the page: this style, this script, and no connection except, live, to its own server.
pub(super) fn policy(live: bool) -> String {
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:; \
         connect-src {}; base-uri 'none'; form-action 'none'",
        base64(&Sha256::digest(CSS)),
        base64(&Sha256::digest(SCRIPT)),
        if live { "'self'" } else { "'none'" },
    )
}

/// JSON that can stand inside a `<script>` element: no `</script`, no `<!--`, no line separators that old parsers of
/// JavaScript trip over.
pub(super) fn script_safe_json<T: Serialize>(data: &T) -> Result<String, RenderError> {
    let json = serde_json::to_string(data).map_err(RenderError::Json)?;
    let mut safe = String::with_capacity(json.len() + json.len() / 64);
    for c in json.chars() {
        match c {
            // These occur in JSON only inside strings, where the escape means the same.
            '<' => safe.push_str("\\u003c"),
            '>' => safe.push_str("\\u003e"),
            '&' => safe.push_str("\\u0026"),
            '\u{2028}' => safe.push_str("\\u2028"),
            '\u{2029}' => safe.push_str("\\u2029"),
            c => safe.push(c),
        }
    }
    Ok(safe)
}

fn escape_text(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for triple in bytes.chunks(3) {
        let word = triple.iter().enumerate().fold(0_u32, |word, (i, &byte)| word | u32::from(byte) << (16 - 8 * i));
        for i in 0..4 {
            if i <= triple.len() {
                let digit = (word >> (18 - 6 * i)) & 63;
                text.push(char::from(DIGITS[digit as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Checkpoint, ReportBuilder, TensorInput};

    fn page_with(key: &str) -> (ReportData, String) {
        let mut builder = ReportBuilder::new(Checkpoint { name: key.to_owned(), ..Checkpoint::default() });
        builder.tensor(TensorInput { key, dtype: "float32", shape: &[], bytes: 4, chunks: &[] });
        let data = builder.finish();
        let page = render(&data).unwrap();
        (data, page)
    }

    #[test]
    fn a_hostile_key_cannot_leave_its_string() {
        let key = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\u{2028}{{script}}&\"'";
        let (data, page) = page_with(key);
        assert!(!page.contains("alert(1)</script>"));
        assert!(!page.contains("<img"));
        assert!(!page.contains("<!--<"));
        let json = page
            .split_once("type=\"application/json\">")
            .and_then(|(_, rest)| rest.split_once("</script>"))
            .map(|(json, _)| json)
            .unwrap();
        assert!(!json.contains(['<', '>', '&', '\u{2028}', '\u{2029}']));
        assert_eq!(serde_json::from_str::<ReportData>(json).unwrap(), data);
    }

    #[test]
    fn nothing_in_the_page_points_outside_it() {
        let (_, page) = page_with("a");
        for forbidden in ["src=", "@import", "url(", "https://", "href=\"http", "innerHTML", "insertAdjacent", "eval("] {
            assert!(!page.contains(forbidden), "{forbidden}");
        }
        // The one address is a namespace, which nobody fetches.
        assert_eq!(page.matches("http://").count(), page.matches("http://www.w3.org/2000/svg").count());
    }

    #[test]
    fn every_placeholder_is_filled() {
        let (_, page) = page_with("a");
        assert!(!page.contains("{{"));
        assert!(page.contains(&policy(false)));
    }

    #[test]
    fn base64_pads_as_it_should() {
        assert_eq!(base64(b""), "");
        assert_eq!(base64(b"f"), "Zg==");
        assert_eq!(base64(b"fo"), "Zm8=");
        assert_eq!(base64(b"foo"), "Zm9v");
        assert_eq!(base64(b"foobar"), "Zm9vYmFy");
    }
}
