//! The texts of the workloads. The floor writes the same ones, so that its rows have the same size.

use std::fmt::Write;

const INTRO: &str = "Look into each of these topics";

pub fn item(n: usize) -> String {
    format!("Topic number {n:05}")
}

/// A message that the offline demo model splits into `children` parts.
pub fn list(children: usize) -> String {
    let mut text = format!("{INTRO}:\n");
    for n in 0..children {
        // Writing to a string can not fail.
        let _ = writeln!(text, "- {}", item(n));
    }
    text
}

/// How many parts a message asks for that is somewhere in this JSON text.
pub fn items_of(json: &[u8]) -> usize {
    json.windows(MARK.len())
        .filter(|w| *w == MARK.as_bytes())
        .count()
}

/// How each line of a list begins, in JSON.
const MARK: &str = "\\n- Topic number ";

/// As the offline model words it.
pub fn child_prompt(n: usize) -> String {
    format!(
        "{}\n\nThis is one part of a larger request: {INTRO}:. Do this part only and answer with its result.",
        item(n)
    )
}

/// As the offline model words it.
pub fn child_answer(n: usize) -> String {
    format!(
        "This is the offline demo model: it answers by rule and knows nothing about the world. Your message of 24 words \
         begins: \u{201c}{}\u{201d}",
        item(n)
    )
}
