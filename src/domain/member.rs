//! What a local user is called and what a password must be (P-4).

/// At most so many characters.
pub const USERNAME_CHARS_MAX: usize = 254;
pub const PASSWORD_CHARS_MIN: usize = 12;
pub const PASSWORD_CHARS_MAX: usize = 200;
pub const KEY_NAME_CHARS_MAX: usize = 100;

/// In lower case, so that nobody has a twin in capitals. E-mail addresses fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Username(String);

impl Username {
    /// The reason completes the sentence "the name …".
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let name = text.to_ascii_lowercase();
        let fits = |c: char| c.is_ascii_alphanumeric() || "._@+-".contains(c);
        match name.len() {
            1..=USERNAME_CHARS_MAX if name.chars().all(fits) => Ok(Self(name)),
            _ => Err("must have 1 to 254 characters of a-z, 0-9, `.`, `_`, `@`, `+` and `-`"),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Why a new password is none. Length is all that is asked; the sentence never holds the password.
pub fn check_password(password: &str) -> Result<(), &'static str> {
    match password.chars().count() {
        PASSWORD_CHARS_MIN..=PASSWORD_CHARS_MAX => Ok(()),
        _ => Err("must have 12 to 200 characters"),
    }
}

/// The name of an API key, on one line.
pub fn check_key_name(name: &str) -> Result<(), &'static str> {
    let length = name.chars().count();
    match (1..=KEY_NAME_CHARS_MAX).contains(&length)
        && !name.trim().is_empty()
        && !name.chars().any(char::is_control)
    {
        true => Ok(()),
        false => Err("must have 1 to 100 characters on one line"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // P-4
    #[test]
    fn names_and_passwords() {
        let name = |text: &str| Username::parse(text).map(|name| name.0);
        assert_eq!(name("Ada"), Ok("ada".into()));
        assert_eq!(
            name("ada.l+x@Example.org"),
            Ok("ada.l+x@example.org".into())
        );
        for bad in ["", " ada", "a b", "ä", "a\0", "a/b", &"a".repeat(255)] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert!(
            check_password(&"ä".repeat(12)).is_ok() && check_password(&"x".repeat(200)).is_ok()
        );
        assert!(check_password("eleven chars").is_ok() && check_password("eleven char").is_err());
        assert!(check_password(&"x".repeat(201)).is_err());
        assert!(check_key_name("ci").is_ok());
        for bad in ["", "  ", "a\nb", "a\0", &"x".repeat(101)] {
            assert!(check_key_name(bad).is_err(), "{bad}");
        }
    }
}
