//! Page cursors: opaque to callers, readable to us, and never trusted.
//!
//! A cursor names the list and order it came from and the last row of its page, so a page continues correctly while rows
//! are added. Whatever does not decode to exactly that is refused; values are still bound like any other input.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

/// The place after which the next page begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The list and its order, such as `tasks-title`. A cursor of another one does not fit.
    pub list: String,
    pub id: Uuid,
    /// The sort key of that row, where it is not the id.
    pub key: String,
}

const VERSION: &str = "1";
/// Sort keys are short (titles have 200 characters), so a longer cursor is not one of ours.
const CHARS_MAX: usize = 2000;

impl Cursor {
    pub fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(format!("{VERSION} {} {} {}", self.list, self.id, self.key))
    }

    /// `None` for anything that [`Cursor::encode`] has not made for this list.
    pub fn decode(text: &str, list: &str) -> Option<Self> {
        if text.len() > CHARS_MAX {
            return None;
        }
        let plain = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        let mut parts = plain.splitn(4, ' ');
        let (version, own_list, id, key) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let fits = version == VERSION && own_list == list && id.len() == 36 && !key.contains('\0');
        let id = Uuid::try_parse(id).ok()?;
        fits.then(|| Self {
            list: list.to_owned(),
            id,
            key: key.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    proptest! {
        // R-5, T-23
        #[test]
        fn a_cursor_survives_the_trip(id in any::<u128>(), key in "[^\u{0}]{0,200}") {
            let cursor = Cursor { list: "tasks-title".into(), id: Uuid::from_u128(id), key };
            prop_assert_eq!(Cursor::decode(&cursor.encode(), "tasks-title"), Some(cursor.clone()));
            prop_assert_eq!(Cursor::decode(&cursor.encode(), "tasks-created"), None);
        }

        #[test]
        fn nothing_else_is_a_cursor(text in ".{0,300}") {
            prop_assert_eq!(Cursor::decode(&text, "tasks-title"), None);
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(Cursor::decode(&URL_SAFE_NO_PAD.encode(bytes), "tasks-title"), None);
        }
    }
}
