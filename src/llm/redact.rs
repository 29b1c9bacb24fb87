//! Takes keys out of texts that users may see. Providers quote them back, also keys that came from elsewhere (T-14).

/// The text without keys: the given ones, and whatever looks like one.
pub fn redact(text: &str, secrets: &[&str]) -> String {
    const MARK: &str = "[redacted]";
    let mut text = text.to_owned();
    for secret in secrets {
        // A shorter one would blank out ordinary words, and protects nothing.
        if secret.chars().count() >= 4 {
            text = text.replace(secret, MARK);
        }
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let before = out.chars().next_back();
        let starts_word = !before.is_some_and(|c| c.is_ascii_alphanumeric());
        let found = starts_word.then(|| key_at(rest)).flatten();
        if let Some((kept, key)) = found {
            out.push_str(&rest[..kept]);
            out.push_str(MARK);
            rest = &rest[kept + key..];
        } else {
            let step = rest.chars().next().map_or(1, char::len_utf8);
            out.push_str(&rest[..step]);
            rest = &rest[step..];
        }
    }
    out
}

/// Where a key begins right here: how many bytes lead to it and how many it has.
fn key_at(text: &str) -> Option<(usize, usize)> {
    // The prefix, whether it is part of the key, and the least length of what follows.
    const KEYS: [(&str, bool, usize); 8] = [
        ("sk-", true, 6),
        ("AIza", true, 20),
        ("gsk_", true, 10),
        ("xai-", true, 10),
        ("bearer ", false, 6),
        ("api_key=", false, 1),
        ("api-key=", false, 1),
        ("key=", false, 1),
    ];
    KEYS.into_iter().find_map(|(prefix, is_key, least)| {
        let head = text.get(..prefix.len())?;
        let same = if is_key {
            head == prefix
        } else {
            head.eq_ignore_ascii_case(prefix)
        };
        let after = &text[prefix.len()..];
        let length = after
            .find(|c: char| !(c.is_ascii_alphanumeric() || "-_.*~+/=".contains(c)))
            .unwrap_or(after.len());
        if !same || length < least || after.starts_with("[redacted]") {
            return None;
        }
        Some(if is_key {
            (0, prefix.len() + length)
        } else {
            (prefix.len(), length)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_redacted() {
        // T-14
        for (text, expected) in [
            ("key is s3cr3t-value!", "key is [redacted]!"),
            (
                "Incorrect API key provided: sk-proj-ab*******xyz.",
                "Incorrect API key provided: [redacted]",
            ),
            (
                "Authorization: Bearer abc.DEF-123, ok",
                "Authorization: Bearer [redacted], ok",
            ),
            ("GET /v1?key=AbC&x=1", "GET /v1?key=[redacted]&x=1"),
            ("AIzaSyA1234567890123456789012", "[redacted]"),
            (
                "the task-force asks the bearer of news",
                "the task-force asks the bearer of news",
            ),
            ("é sk-é bearer s3cr3t-value", "é sk-é bearer [redacted]"),
        ] {
            assert_eq!(redact(text, &["s3cr3t-value", "x"]), expected);
        }
    }
}
