//! Server-Sent Events framing over raw bytes.
//!
//! Our own rather than eventsource-stream, which (0.2.3) panics on a byte order mark, and after one invalid byte delivers
//! nothing more until the connection closes. Lines are cut on bytes and decoded whole, so a character that the network
//! split in two is never seen half (H-29). A byte that is truly invalid becomes `U+FFFD`, and reading goes on.

/// A provider that sends more than this in one event is broken.
const EVENT_BYTES_MAX: usize = 16 * 1024 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// Empty where the stream names none.
    pub name: String,
    pub data: String,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of more than {} MB", EVENT_BYTES_MAX / 1024 / 1024)]
pub struct EventTooLong;

#[derive(Default)]
pub struct Frames {
    line: Vec<u8>,
    data: Vec<u8>,
    name: Vec<u8>,
    has_data: bool,
    /// The last byte was CR: an LF right after it belongs to it.
    after_cr: bool,
    started: bool,
}

impl Frames {
    /// Adds bytes as they arrive and appends the events that they complete.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut Vec<Event>) -> Result<(), EventTooLong> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            self.line
                .extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
            if self.line.len() + self.data.len() > EVENT_BYTES_MAX {
                return Err(EventTooLong);
            }
            let Some(end) = end else { break };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(out);
        }
        Ok(())
    }

    /// The end of the body. The event in progress counts although its blank line is missing: some servers leave it out
    /// after the end mark. A cut event shows as broken JSON.
    pub fn finish(mut self, out: &mut Vec<Event>) {
        if !self.line.is_empty() {
            self.end_line(out);
        }
        self.dispatch(out);
    }

    fn end_line(&mut self, out: &mut Vec<Event>) {
        let line = std::mem::take(&mut self.line);
        let line = match line.strip_prefix(b"\xef\xbb\xbf") {
            Some(rest) if !self.started => rest,
            _ => &line[..],
        };
        self.started = true;
        if line.is_empty() {
            return self.dispatch(out);
        }
        let (field, value) = match line.iter().position(|&byte| byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &b""[..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
                self.has_data = true;
            }
            b"event" => self.name = value.to_vec(),
            // Comments (an empty field name) and fields that carry no content.
            _ => {}
        }
    }

    fn dispatch(&mut self, out: &mut Vec<Event>) {
        let name = std::mem::take(&mut self.name);
        if std::mem::take(&mut self.has_data) {
            out.push(Event {
                name: decode(name),
                data: decode(std::mem::take(&mut self.data)),
            });
        }
    }
}

fn decode(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let mut frames = Frames::default();
        let mut events = Vec::new();
        for piece in pieces {
            frames.push(piece, &mut events).unwrap();
        }
        frames.finish(&mut events);
        events
            .into_iter()
            .map(|event| match event.name.as_str() {
                "" => event.data,
                name => format!("{name}={}", event.data),
            })
            .collect()
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        // H-28
        for (stream, expected) in [
            ("data: a\n\ndata: b\n\n", vec!["a", "b"]),
            ("data:a\r\n\r\ndata:  b\r\rdata:c\n\n", vec!["a", " b", "c"]),
            (
                ": hi\n\ndata: a\n: keep-alive\n\n:\n\n: x\ndata: b\n\n",
                vec!["a", "b"],
            ),
            ("data: a\ndata: b\ndata\n\n", vec!["a\nb\n"]),
            ("data:\n\ndata: \n\n", vec!["", ""]),
            (
                "event: ping\n\nevent: ping\ndata: {}\n\nid: 7\nretry: 1\ndata: a\n\n",
                vec!["ping={}", "a"],
            ),
            ("\u{feff}data: a\n\n\u{feff}data: b\n\n", vec!["a"]),
            ("data: a\n\ndata: [DONE]", vec!["a", "[DONE]"]),
            ("", vec![]),
            ("\n\n\n", vec![]),
        ] {
            assert_eq!(read(&[stream.as_bytes()]), expected, "{stream:?}");
        }
    }

    #[test]
    fn an_invalid_byte_becomes_the_replacement_character_and_reading_goes_on() {
        // H-29
        assert_eq!(
            read(&[b"data: a\xffb\n\n", b"data: c\n\n"]),
            ["a\u{fffd}b", "c"]
        );
        assert_eq!(read(&[b"data: \xe2\x82\n\n"]), ["\u{fffd}"]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut frames = Frames::default();
        let piece = vec![b'x'; EVENT_BYTES_MAX];
        assert_eq!(frames.push(&piece, &mut Vec::new()), Ok(()));
        assert_eq!(frames.push(b"y", &mut Vec::new()), Err(EventTooLong));
    }

    proptest! {
        #[test]
        fn the_cut_points_do_not_matter(
            stream in "(data: ?|event:|:|\r\n|\r|\n|é|€|😀|a|\u{feff}){0,40}",
            cuts in prop::collection::vec(1usize..6, 0..60),
        ) {
            // H-29
            let mut pieces = Vec::new();
            let mut rest = stream.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            prop_assert_eq!(read(&pieces), read(&[stream.as_bytes()]));
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            read(&[&bytes]);
        }
    }
}
