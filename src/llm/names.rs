//! Names of tools as providers take them.

use std::borrow::Cow;

/// A name that providers accept in the history. Models invent others (H-23), and a history that holds one would be
/// refused for ever.
pub fn wire_name(name: &str) -> Cow<'_, str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if (1..=64).contains(&name.len()) && name.chars().all(fits) {
        return Cow::Borrowed(name);
    }
    let name: String = name
        .chars()
        .take(64)
        .map(|c| if fits(c) { c } else { '_' })
        .collect();
    Cow::Owned(if name.is_empty() {
        "unnamed".to_owned()
    } else {
        name
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_history_are_names_that_providers_accept() {
        // H-23
        assert!(matches!(
            wire_name("get_rows-2"),
            Cow::Borrowed("get_rows-2")
        ));
        assert_eq!(wire_name(""), "unnamed");
        assert_eq!(wire_name("a b/é"), "a_b__");
        assert_eq!(wire_name(&"x".repeat(300)), "x".repeat(64));
    }
}
