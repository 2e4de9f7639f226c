//! Addresses in messages, without what is secret in them.

/// What ends an address inside a sentence.
const ENDS: [char; 4] = [' ', '\n', '\t', '"'];

/// The text with the credentials and the values of queries (signatures, tokens) of every URL in it hidden.
///
/// Messages are logged and pasted. An address that carries a password is refused, and the refusal must not repeat it; a
/// client's own error may name a signed URL.
pub fn redacted(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        let end = after.find(ENDS).unwrap_or(after.len());
        let (url, next) = after.split_at(end);
        shown.push_str(before);
        shown.push_str("://");
        shown.push_str(&hidden(url));
        rest = next;
    }
    shown.push_str(rest);
    shown
}

/// What follows `://`, with credentials and the values of its query hidden.
fn hidden(url: &str) -> String {
    let (place, query) = match url.split_once('?') {
        Some((place, query)) => (place, Some(query)),
        None => (url, None),
    };
    let authority = place.split_once('/').map_or(place, |(authority, _)| authority);
    // A password may itself hold a `/` or a `?`: whatever is before the last `@` is not shown when it looks like one.
    let password = authority.split_once(':').is_some_and(|(_, port)| !port.bytes().all(|b| b.is_ascii_digit()));
    let mut shown = match (authority.rfind('@'), password.then(|| url.rfind('@')).flatten()) {
        (_, Some(at)) if at >= place.len() => return format!("***@{}", &url[at + 1..]),
        (_, Some(at)) | (Some(at), None) => format!("***@{}", &place[at + 1..]),
        (None, None) if password => format!("***{}", &place[authority.len()..]),
        (None, None) => place.to_owned(),
    };
    if let Some(query) = query {
        let hide = |word: &str| word.split_once('=').map_or_else(|| "***".to_owned(), |(name, _)| format!("{name}=***"));
        let words: Vec<String> = query.split('&').map(hide).collect();
        shown.push('?');
        shown.push_str(&words.join("&"));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_and_the_rest_is_not() {
        for (text, shown) in [
            ("opening s3://bucket/a/b", "opening s3://bucket/a/b"),
            ("https://host:81/a", "https://host:81/a"),
            ("a/b://c@d", "a/b://***@d"),
            ("s3://key:secret@bucket/a, again", "s3://***@bucket/a, again"),
            ("s3://key:sec/ret@bucket/a", "s3://***@bucket/a"),
            ("s3://key:sec?ret@bucket/a", "s3://***@bucket/a"),
            ("s3://key:secret/a", "s3://***/a"),
            ("s3://bucket/a@b", "s3://bucket/a@b"),
            ("for url (https://h/c/x?sv=2024&sig=abc%2F) failed", "for url (https://h/c/x?sv=***&sig=*** failed"),
            ("https://h/x?token \"s3://u:p@b\"", "https://h/x?*** \"s3://***@b\""),
            ("nothing at all", "nothing at all"),
        ] {
            assert_eq!(redacted(text), shown, "{text}");
        }
    }
}
