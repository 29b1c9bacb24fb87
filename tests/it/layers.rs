//! The rules of the design that a reader would have to keep in mind: which module may know which, where SQL stands, who
//! writes, whose clock counts. They are read from the sources, test modules left out.
//!
//! An exception stands below with its reason; one that is no longer needed fails too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

/// Lines without tests. A file over 500 is a question; over this it is split.
const LINES_MAX: usize = 700;

/// Statements outside `store/`.
const SQL_ELSEWHERE: [(&str, &str); 2] = [
    (
        "src/postgres/server.rs",
        "makes the database itself, before there is a schema",
    ),
    (
        "src/commands/doctor.rs",
        "asks the server for its clock, settings and version",
    ),
];

/// Writing functions of `store/` named outside `lifecycle/`.
const WRITES_ELSEWHERE: [(&str, &str); 1] = [(
    "src/bus.rs",
    "signs of life and streamed text: lost without harm, and no part of any task's state",
)];

/// Where the clock of this machine is read.
const CLOCK_OF_THIS_MACHINE: [(&str, &str); 5] = [
    ("src/api/auth.rs", "tokens name the time at which they end"),
    ("src/api/stream.rs", "a stream ends with its token"),
    (
        "src/llm/http.rs",
        "Retry-After may be a date; a duration is made of it",
    ),
    ("src/tools/http_request/send.rs", "as above"),
    (
        "src/commands/doctor.rs",
        "compares this clock with the database's",
    ),
];

// R-3 stands on this: a time that is stored is made by the database.
#[test]
fn only_the_database_knows_what_time_it_is() {
    let found = files_with(|source| {
        source.names(|path| {
            matches!(path, [.., clock, now]
                if now == "now" && ["Utc", "Local", "SystemTime"].contains(&clock.as_str()))
        })
    });
    assert_excepted(found, &CLOCK_OF_THIS_MACHINE);
}

#[test]
fn a_module_imports_lower_ranks_only() {
    let ranks = ranks();
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|source| !source.module.is_empty()) {
        let own = &source.module[0];
        let rank = ranks
            .get(own)
            .unwrap_or_else(|| panic!("src/lib.rs gives `{own}` no rank"));
        for path in &source.paths {
            let [at, module, ..] = path.as_slice() else {
                continue;
            };
            if at != "crate" || module == own {
                continue;
            }
            match ranks.get(module) {
                Some(other) if other < rank => {}
                Some(other) => wrong.push(format!(
                    "{} (rank {rank}) names {} (rank {other})",
                    source.file,
                    path.join("::")
                )),
                None => wrong.push(format!(
                    "{} names {}, which has no rank",
                    source.file,
                    path.join("::")
                )),
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    // The rules below would hold of nothing at all, too.
    assert!(sources().len() > 60 && ranks.len() > 10);
}

#[test]
fn sql_stands_in_store() {
    const MAKERS: [&str; 6] = [
        "query",
        "query_as",
        "query_scalar",
        "query_with",
        "raw_sql",
        "QueryBuilder",
    ];
    let found = files_with(|source| {
        source.names(|path| match path {
            [at, maker, ..] => at == "sqlx" && MAKERS.contains(&maker.as_str()),
            _ => false,
        })
    });
    let found = found
        .into_iter()
        .filter(|file| !file.starts_with("src/store/"));
    assert_excepted(found.collect(), &SQL_ELSEWHERE);
}

#[test]
fn only_the_lifecycle_writes() {
    let sources = sources();
    let writers: BTreeSet<Vec<String>> = sources
        .iter()
        .filter(|source| {
            source
                .module
                .first()
                .is_some_and(|module| module == "store")
        })
        .flat_map(|source| {
            let at = [&["crate".to_owned()], source.module.as_slice()].concat();
            writers(source)
                .into_iter()
                .map(move |name| [at.as_slice(), &[name]].concat())
        })
        .collect();
    // Known ones of each kind, so that a change of style does not empty the set.
    for known in [
        "changes::apply",
        "steps::claim_all_workspaces",
        "bus::beat",
        "idempotency::forget_old_all_workspaces",
    ] {
        assert!(
            writers.contains(&split(&format!("crate::store::{known}"))),
            "{known}: {writers:?}"
        );
    }
    for reader in [
        "feeds::items",
        "steps::lock",
        "task_views::list",
        "events::surroundings",
    ] {
        assert!(
            !writers.contains(&split(&format!("crate::store::{reader}"))),
            "{reader}"
        );
    }
    let found = files_with(|source| source.names(|path| writers.contains(path)));
    let found = found
        .into_iter()
        .filter(|file| !file.starts_with("src/store/") && !file.starts_with("src/lifecycle/"));
    assert_excepted(found.collect(), &WRITES_ELSEWHERE);
}

#[test]
fn the_domain_does_nothing_but_decide() {
    const DOING: [&str; 8] = [
        "tokio",
        "futures",
        "reqwest",
        "std::fs",
        "std::net",
        "std::process",
        "std::thread",
        "std::env",
    ];
    for source in sources() {
        if source
            .module
            .first()
            .is_none_or(|module| module != "domain")
        {
            continue;
        }
        for word in ["async", "await"] {
            assert!(
                !source.words().any(|found| found == word),
                "{}: {word}",
                source.file
            );
        }
        let doing = |path: &[String]| DOING.iter().any(|doing| path.starts_with(&split(doing)));
        assert!(!source.names(doing), "{} does I/O", source.file);
    }
}

#[test]
fn files_are_short() {
    let long: Vec<String> = sources()
        .iter()
        .filter(|source| source.lines > LINES_MAX)
        .map(|source| format!("{}: {} lines without tests", source.file, source.lines))
        .collect();
    assert_eq!(long, Vec::<String>::new());
}

// How the sources are read.

/// A file of `src/`.
struct Source {
    /// `src/store/steps.rs`
    file: String,
    /// `["store", "steps"]`
    module: Vec<String>,
    /// As it stands, with test modules blanked out.
    text: String,
    /// The same without comments and without what stands in quotes, of the same length.
    code: String,
    /// Every path that it names, made absolute through its `use` lines: `crate::…` or an outside crate.
    paths: BTreeSet<Vec<String>>,
    lines: usize,
}

impl Source {
    fn names(&self, wanted: impl Fn(&[String]) -> bool) -> bool {
        self.paths.iter().any(|path| wanted(path))
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        self.code
            .split(|c: char| !is_word(c))
            .filter(|word| !word.is_empty())
    }
}

fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    collect(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        "src",
        &mut found,
    );
    // `#[cfg(test)] mod tests;` makes a whole file a test module.
    let tests: BTreeSet<Vec<String>> = found
        .iter()
        .flat_map(|(source, tests): &(Source, Vec<String>)| {
            tests
                .iter()
                .map(|name| [source.module.as_slice(), std::slice::from_ref(name)].concat())
        })
        .collect();
    found
        .into_iter()
        .map(|(source, _)| source)
        .filter(|source| !tests.iter().any(|test| source.module.starts_with(test)))
        .collect()
}

fn collect(dir: &Path, name: &str, found: &mut Vec<(Source, Vec<String>)>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let file = format!("{name}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() {
            collect(&entry.path(), &file, found);
        } else if file.ends_with(".rs") && file != "src/main.rs" {
            found.push(read(file, fs::read_to_string(entry.path()).unwrap()));
        }
    }
}

fn read(file: String, mut text: String) -> (Source, Vec<String>) {
    let mut code = masked(&text);
    let mut tests = Vec::new();
    while let Some(start) = code.find("#[cfg(test)]") {
        let rest = &code[start..];
        let end = match (rest.find(';'), rest.find('{')) {
            (Some(semicolon), brace) if brace.is_none_or(|brace| semicolon < brace) => {
                tests.extend(rest[..semicolon].rsplit(' ').next().map(str::to_owned));
                start + semicolon + 1
            }
            (_, Some(brace)) => start + brace + block(&rest[brace..]),
            (_, None) => code.len(),
        };
        for part in [&mut text, &mut code] {
            let blank: String = part[start..end]
                .bytes()
                .map(|b| if b == b'\n' { '\n' } else { ' ' })
                .collect();
            part.replace_range(start..end, &blank);
        }
    }
    let trimmed = file
        .strip_prefix("src/")
        .unwrap()
        .strip_suffix(".rs")
        .unwrap();
    let mut module: Vec<String> = trimmed.split('/').map(str::to_owned).collect();
    module.pop_if(|last| last == "mod" || last == "lib");
    let paths = paths(&code, &module);
    let lines = text.trim_end().lines().count();
    (
        Source {
            file,
            module,
            text,
            code,
            paths,
            lines,
        },
        tests,
    )
}

/// Comments and what stands in quotes become blanks, byte for byte.
fn masked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let (inside, length) = if rest.starts_with("//") {
            (0, rest.find('\n').unwrap_or(rest.len()))
        } else if rest.starts_with("/*") {
            (0, rest.find("*/").map_or(rest.len(), |end| end + 2))
        } else if rest.starts_with('r')
            && !text[..at].ends_with(is_word)
            && raw_string(rest).is_some()
        {
            (1, raw_string(rest).unwrap())
        } else if rest.starts_with('"') {
            (1, quoted(rest))
        } else if let Some(length) = character(rest) {
            (1, length)
        } else {
            at += rest.chars().next().unwrap().len_utf8();
            continue;
        };
        // The quotes stay, so that a literal still separates what stands around it.
        for byte in &mut out[at + inside..at + length - inside] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += length;
    }
    String::from_utf8(out).unwrap()
}

fn raw_string(text: &str) -> Option<usize> {
    let hashes = text[1..].bytes().take_while(|byte| *byte == b'#').count();
    let body = text[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text.len() - body.len() + body.find(&end)? + end.len())
}

fn quoted(text: &str) -> usize {
    let mut bytes = text.bytes().enumerate().skip(1);
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => return at + 1,
            b'\\' => drop(bytes.next()),
            _ => {}
        }
    }
    text.len()
}

/// The length of a character in quotes; `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let inner = text.strip_prefix('\'')?;
    let length = match inner.strip_prefix('\\') {
        Some(escape) => 2 + escape[1..].find('\'')?,
        None => inner.chars().next()?.len_utf8(),
    };
    inner[length..].starts_with('\'').then_some(length + 2)
}

/// The length of a block, from its brace to the one that closes it.
fn block(code: &str) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn split(path: &str) -> Vec<String> {
    path.split("::").map(str::to_owned).collect()
}

/// Words, `::`, and single other characters.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            _ if is_word(first) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            ':' if rest.starts_with("::") => 2,
            other => other.len_utf8(),
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    found
}

fn paths(code: &str, module: &[String]) -> BTreeSet<Vec<String>> {
    let tokens = tokens(code);
    let mut imported: HashMap<String, Vec<String>> = HashMap::new();
    let mut found = BTreeSet::new();
    let mut inline = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        // `use<>` in a bound is no import.
        if tokens[at] == "use" && tokens.get(at + 1) != Some(&"<") {
            let mut leaves = Vec::new();
            at = tree(&tokens, at + 1, vec![], &mut leaves);
            for (path, name) in leaves {
                let path = absolute(path, module, &imported);
                imported.insert(name, path.clone());
                found.insert(path);
            }
        } else if tokens[at].starts_with(is_word) {
            let mut path = vec![tokens[at].to_owned()];
            while tokens.get(at + 1) == Some(&"::")
                && tokens
                    .get(at + 2)
                    .is_some_and(|next| next.starts_with(is_word))
            {
                path.push(tokens[at + 2].to_owned());
                at += 2;
            }
            inline.push(path);
            at += 1;
        } else {
            at += 1;
        }
    }
    found.extend(
        inline
            .into_iter()
            .map(|path| absolute(path, module, &imported)),
    );
    found
}

/// Reads one tree of a `use` line into its leaves and the names they go by here.
fn tree(
    tokens: &[&str],
    mut at: usize,
    mut path: Vec<String>,
    leaves: &mut Vec<(Vec<String>, String)>,
) -> usize {
    loop {
        match tokens[at] {
            "::" => at += 1,
            "{" => {
                at += 1;
                while tokens[at] != "}" {
                    at = tree(tokens, at, path.clone(), leaves);
                    if tokens[at] == "," {
                        at += 1;
                    }
                }
                return at + 1;
            }
            "as" => {
                leaves.push((path, tokens[at + 1].to_owned()));
                return at + 2;
            }
            word if word.starts_with(is_word) => {
                if word != "self" || path.is_empty() {
                    path.push(word.to_owned());
                }
                at += 1;
            }
            "*" => at += 1,
            _ => {
                let name = path.last().cloned().unwrap_or_default();
                leaves.push((path, name));
                return at;
            }
        }
    }
}

fn absolute(
    path: Vec<String>,
    module: &[String],
    imported: &HashMap<String, Vec<String>>,
) -> Vec<String> {
    let own = || [&["crate".to_owned()], module].concat();
    match path[0].as_str() {
        "crate" => path,
        "self" => [own(), path[1..].to_vec()].concat(),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let mut base = own();
            base.truncate(base.len().saturating_sub(ups).max(1));
            [base, path[ups..].to_vec()].concat()
        }
        first => match imported.get(first) {
            Some(base) => [base.clone(), path[1..].to_vec()].concat(),
            None => path,
        },
    }
}

/// The ranks as `src/lib.rs` states them.
fn ranks() -> BTreeMap<String, u32> {
    let lib = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let text: String = lib
        .lines()
        .filter_map(|line| line.strip_prefix("//! "))
        .collect::<Vec<_>>()
        .join(" ");
    let (_, rule) = text
        .split_once("enforces it):")
        .expect("src/lib.rs states the ranks");
    let mut ranks = BTreeMap::new();
    for part in rule.split(';') {
        let (rank, names) = part.trim().split_once(' ').unwrap();
        let names = names.split('`').skip(1).step_by(2);
        ranks.extend(names.map(|name| (name.to_owned(), rank.parse().unwrap())));
    }
    ranks
}

/// The functions of a file whose SQL writes, or that call one that does.
fn writers(source: &Source) -> BTreeSet<String> {
    let mut functions: Vec<(String, usize, usize)> = Vec::new();
    for (at, _) in source.code.match_indices("fn ") {
        let name = source.code[at + 3..].split(|c| !is_word(c)).next().unwrap();
        if let Some(brace) = source.code[at..].find('{').filter(|_| !name.is_empty()) {
            let start = at + brace;
            functions.push((name.to_owned(), start, start + block(&source.code[start..])));
        }
    }
    let mut found: BTreeSet<String> = BTreeSet::new();
    loop {
        let before = found.len();
        for (name, start, end) in &functions {
            let calls = tokens(&source.code[*start..*end]);
            if writes(&source.text[*start..*end])
                || calls
                    .windows(3)
                    .any(|w| w[0] != "." && found.contains(w[1]) && w[2] == "(")
            {
                found.insert(name.clone());
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

fn writes(text: &str) -> bool {
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c == '"')
        .filter(|word| !word.is_empty())
        .collect();
    words.windows(4).any(|w| match w {
        ["insert", "into", ..] | ["delete", "from", ..] => true,
        // `update steps set`, `update steps s set`; never `for no key update of s`.
        ["update", _, "set", _] | ["update", _, _, "set"] => true,
        _ => false,
    })
}

fn files_with(wanted: impl Fn(&Source) -> bool) -> BTreeSet<String> {
    sources()
        .into_iter()
        .filter(|source| wanted(source))
        .map(|source| source.file)
        .collect()
}

#[track_caller]
fn assert_excepted(found: BTreeSet<String>, excepted: &[(&str, &str)]) {
    let excepted: BTreeSet<String> = excepted
        .iter()
        .map(|(file, _)| (*file).to_owned())
        .collect();
    assert_eq!(found, excepted);
}
