//! What people may write: message texts and titles, parsed once at the edge (T-3).

use super::decision::clean;

/// At most so many characters in a message, after trimming.
pub const MESSAGE_CHARS_MAX: usize = 100_000;
/// At most so many characters in a title; longer ones are cut, on a character boundary.
pub const TITLE_CHARS_MAX: usize = 200;

/// 1 to 100,000 characters after trimming, without NUL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageText(String);

/// 1 to 200 characters on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Title(String);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    #[error("is empty; write at least one character that is not blank")]
    Empty,
    #[error("has {0} characters; the most is {MESSAGE_CHARS_MAX}")]
    TooLong(usize),
    #[error("holds a NUL character (U+0000), which can not be stored; remove it")]
    Nul,
}

impl MessageText {
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let text = text.trim();
        if text.contains('\0') {
            return Err(TextError::Nul);
        }
        match text.chars().count() {
            0 => Err(TextError::Empty),
            n if n > MESSAGE_CHARS_MAX => Err(TextError::TooLong(n)),
            _ => Ok(Self(text.to_owned())),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Title {
    /// A given title: refused when blank or with NUL, cut when too long.
    pub fn parse(text: &str) -> Result<Self, TextError> {
        if text.contains('\0') {
            return Err(TextError::Nul);
        }
        Self::cut(text).ok_or(TextError::Empty)
    }

    /// The title of a task that was given none: the first line of its message that is not blank.
    pub fn from_message(message: &MessageText) -> Self {
        message
            .0
            .lines()
            .find_map(Self::cut)
            .unwrap_or_else(|| Self("Untitled".into()))
    }

    /// The first line that is not blank: for titles made by code or models, where there is nobody to refuse to.
    pub fn from_text(text: &str) -> Self {
        clean(text)
            .lines()
            .find_map(Self::cut)
            .unwrap_or_else(|| Self("Untitled".into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn cut(text: &str) -> Option<Self> {
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let cut = cut_chars(&line, TITLE_CHARS_MAX).trim_end();
        (!cut.is_empty()).then(|| Self(cut.to_owned()))
    }
}

/// The first `max` characters of `text`, never half a character.
pub fn cut_chars(text: &str, max: usize) -> &str {
    match text.char_indices().nth(max) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// About how many tokens a model makes of the text: four characters to one. Good to compare parts of a prompt, not to bill.
pub fn estimated_tokens(text: &str) -> usize {
    text.chars().count().div_ceil(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    // T-3, H-32
    #[test]
    fn message_is_1_to_100_000_characters_after_trimming() {
        assert_eq!(MessageText::parse("  hi\n").unwrap().as_str(), "hi");
        assert_eq!(MessageText::parse(" \n\t "), Err(TextError::Empty));
        assert_eq!(MessageText::parse("a\0b"), Err(TextError::Nul));
        assert!(MessageText::parse(&"ß".repeat(100_000)).is_ok());
        assert_eq!(
            MessageText::parse(&"ß".repeat(100_001)),
            Err(TextError::TooLong(100_001))
        );
    }

    // T-3, H-32
    #[test]
    fn title_is_cut_on_a_character_boundary_and_made_from_the_first_line() {
        let message = MessageText::parse(&format!("\n  {}\nsecond", "🦀".repeat(300))).unwrap();
        assert_eq!(Title::from_message(&message).as_str(), "🦀".repeat(200));
        assert_eq!(
            Title::parse("  two\n lines ").unwrap().as_str(),
            "two lines"
        );
        assert_eq!(Title::parse("  "), Err(TextError::Empty));
        assert_eq!(Title::parse("a\0"), Err(TextError::Nul));
        assert_eq!(Title::from_text("").as_str(), "Untitled");
    }
}
