//! `{{name}}` in texts that an author has written. A text is looked through once: what is put in for a name stands there
//! literally, whatever it looks like (H-38).

/// A piece of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    Text(&'a str),
    Name(&'a str),
}

/// The pieces in order. Braces around anything but a name are text.
pub fn parts(template: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let (mut text, mut from) = (0, 0);
    while let Some(open) = template[from..].find("{{").map(|at| from + at) {
        let name = template[open + 2..].split_once("}}").map(|(name, _)| name);
        match name.filter(|name| is_name(name.trim())) {
            Some(name) => {
                if text < open {
                    parts.push(Part::Text(&template[text..open]));
                }
                parts.push(Part::Name(name.trim()));
                from = open + 2 + name.len() + 2;
                text = from;
            }
            // `{{{name}}` is a brace and a name.
            None => from = open + 1,
        }
    }
    if text < template.len() {
        parts.push(Part::Text(&template[text..]));
    }
    parts
}

/// The name, where the template is nothing but one.
pub fn only_name(template: &str) -> Option<&str> {
    match parts(template)[..] {
        [Part::Name(name)] => Some(name),
        _ => None,
    }
}

/// The names that stand in it, in order.
pub fn names(template: &str) -> impl Iterator<Item = &str> {
    parts(template).into_iter().filter_map(|part| match part {
        Part::Name(name) => Some(name),
        Part::Text(_) => None,
    })
}

/// Letters, digits and `_`, not beginning with a digit.
pub fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && text.starts_with(|c: char| !c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use Part::{Name, Text};
    use proptest::prelude::*;

    // H-38
    #[test]
    fn a_template_is_cut_at_its_names_and_nowhere_else() {
        for (template, expected) in [
            ("", vec![]),
            ("{{a}}", vec![Name("a")]),
            ("{{ a_1 }}!", vec![Name("a_1"), Text("!")]),
            ("x{{a}}{{b}}", vec![Text("x"), Name("a"), Name("b")]),
            ("{{{a}}}", vec![Text("{"), Name("a"), Text("}")]),
            ("{{a b}} {{}} {{1}} {{", vec![Text("{{a b}} {{}} {{1}} {{")]),
            ("{{x {{é}} {{a}}", vec![Text("{{x {{é}} "), Name("a")]),
        ] {
            assert_eq!(parts(template), expected, "{template}");
        }
        assert_eq!(only_name("{{a}}"), Some("a"));
        assert_eq!(only_name(" {{a}}"), None);
    }

    proptest! {
        #[test]
        fn the_pieces_are_the_template(template in "[{}ab é]{0,30}") {
            let written: String = parts(&template).iter().map(|part| match part {
                Text(text) => (*text).to_owned(),
                Name(name) => format!("{{{{{name}}}}}"),
            }).collect();
            prop_assert_eq!(written.replace(' ', ""), template.replace(' ', ""));
        }
    }
}
