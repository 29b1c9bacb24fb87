//! Finds PostgreSQL's programs and starts them: no shell, an empty environment, the server's account.

use super::home::{Home, check_reachable};
use super::{PostgresError, io};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The oldest major version whose options we use.
const OLDEST: u32 = 14;
/// Where distributions keep version folders such as `15/bin` or `postgresql@15/bin`.
const VERSION_ROOTS: [&str; 5] = [
    "/usr/lib/postgresql",
    "/usr/local/pgsql",
    "/opt/homebrew/opt",
    "/usr/local/opt",
    "/usr",
];

/// The folder of a usable PostgreSQL.
#[derive(Debug)]
pub struct Programs {
    dir: PathBuf,
}

impl Programs {
    /// In `explicit` only, if given; else in the distributions' folders, newest first, then on the search path. A database
    /// that exists decides the version.
    pub fn find(explicit: Option<&Path>, home: &Home) -> Result<Programs, PostgresError> {
        let candidates = match explicit {
            Some(dir) => vec![dir.to_owned()],
            None => usual_folders(),
        };
        let wanted = std::fs::read_to_string(home.cluster().join("PG_VERSION"))
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());

        let mut others = Vec::new();
        for dir in candidates {
            if !["initdb", "postgres"]
                .iter()
                .all(|name| dir.join(name).is_file())
            {
                continue;
            }
            let Some(version) = version_of(&dir)? else {
                continue;
            };
            match wanted {
                Some(wanted) if wanted != version => others.push(version),
                None if version < OLDEST => {
                    return Err(PostgresError::TooOld {
                        dir,
                        found: version,
                        oldest: OLDEST,
                    });
                }
                Some(_) | None => {
                    if let Some(account) = home.account() {
                        check_reachable(&dir, account)?;
                    }
                    return Ok(Programs { dir });
                }
            }
        }
        match (wanted, others.is_empty()) {
            (Some(wanted), false) => {
                let found = others
                    .iter()
                    .map(u32::to_string)
                    .collect::<Vec<_>>()
                    .join(", ");
                Err(PostgresError::WrongVersion {
                    cluster: home.cluster(),
                    wanted,
                    found,
                })
            }
            _ => Err(PostgresError::ProgramsMissing {
                looked_in: explicit.map(Path::to_owned),
            }),
        }
    }

    /// A command that runs as the server's account, in its own process group (so that Ctrl-C in our terminal does not reach
    /// it before us).
    pub fn command(&self, name: &str, home: &Home, working_dir: &Path) -> tokio::process::Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(self.dir.join(name));
        if let Some(account) = home.account() {
            // The standard library drops the supplementary groups too.
            command.gid(account.gid).uid(account.uid);
        }
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("LC_ALL", "C.UTF-8")
            .env("TZ", "UTC")
            .current_dir(working_dir)
            .stdin(Stdio::null())
            .process_group(0);
        command.into()
    }
}

fn usual_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for root in VERSION_ROOTS {
        let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
        let mut versions: Vec<(u32, PathBuf)> = entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let version = name.rsplit(['@', '-']).next()?.parse().ok()?;
                Some((version, entry.path().join("bin")))
            })
            .collect();
        versions.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
        folders.extend(versions.into_iter().map(|(_, dir)| dir));
    }
    folders.push("/usr/local/pgsql/bin".into());
    folders.extend(crate::config::program_folders());
    folders
}

/// The major version that `postgres -V` reports; `None` if that is not what PostgreSQL says.
fn version_of(dir: &Path) -> Result<Option<u32>, PostgresError> {
    let program = dir.join("postgres");
    let output = Command::new(&program)
        .arg("-V")
        .stdin(Stdio::null())
        .output()
        .map_err(io(format!("{} cannot be run", program.display())))?;
    Ok(major_version(&String::from_utf8_lossy(&output.stdout)))
}

fn major_version(text: &str) -> Option<u32> {
    let rest = text.split_once("(PostgreSQL) ")?.1;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_versions() {
        for (text, version) in [
            (
                "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n",
                Some(15),
            ),
            ("postgres (PostgreSQL) 18beta1\n", Some(18)),
            ("not it", None),
        ] {
            assert_eq!(major_version(text), version, "{text}");
        }
    }
}
