//! The data directory: what lies where, who may enter, and files that hold a secret.
//!
//! All problems of paths and permissions are found here, before anything is started, because PostgreSQL's own messages
//! about them come late and name the wrong thing.

use super::{PostgresError, io};
use secrecy::SecretString;
use std::fs::{DirBuilder, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Only part of the socket's name; nothing listens on a port.
pub const PORT: u16 = 5432;
/// `sun_path` less its NUL, on Linux.
const SOCKET_PATH_MAX: usize = 107;

const UNFINISHED: &str = "unfinished-cluster-";

/// The account that the server runs as when we are root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

/// A data directory that is fit for use.
#[derive(Debug)]
pub struct Home {
    dir: PathBuf,
    account: Option<Account>,
}

impl Home {
    /// Creates the folders and checks that the server's account can reach them.
    pub fn prepare(data_dir: &Path) -> Result<Home, PostgresError> {
        let absolute = std::path::absolute(data_dir)
            .map_err(io(format!("{} is not a usable path", data_dir.display())))?;
        check_socket_path(&absolute)?;
        let us = rustix::process::geteuid();
        let owner = absolute.join("cluster").metadata().ok();
        let account = match (us.is_root(), owner) {
            (true, owner) => Some(account_for_root(owner)?),
            (false, Some(owner)) if owner.uid() != us.as_raw() => {
                return Err(PostgresError::NotOurs {
                    cluster: absolute.join("cluster"),
                });
            }
            (false, _) => None,
        };
        // What is there already is checked first, so that nothing is made in a place that can not be used.
        if let (Some(account), Some(existing)) =
            (&account, absolute.ancestors().find(|dir| dir.exists()))
        {
            check_reachable(existing, account)?;
        }
        create_dir(&absolute, if us.is_root() { 0o711 } else { 0o700 })?;
        let dir = absolute
            .canonicalize()
            .map_err(io(format!("{} cannot be entered", absolute.display())))?;
        check_socket_path(&dir)?;
        if let Some(account) = &account {
            check_reachable(&dir, account)?;
        }
        let home = Home { dir, account };
        home.give_dir(&home.socket_dir())?;
        Ok(home)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }

    /// PostgreSQL's own data directory. Complete if it exists.
    pub fn cluster(&self) -> PathBuf {
        self.dir.join("cluster")
    }

    /// A new name for a cluster that is being made.
    pub fn unfinished_cluster(&self) -> PathBuf {
        self.dir
            .join(format!("{UNFINISHED}{}", uuid::Uuid::now_v7().simple()))
    }

    /// What killed starts left. Best effort: it is in nobody's way.
    pub fn remove_unfinished_clusters(&self) {
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                let path = entry.path();
                let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
            }
        }
    }

    pub fn socket_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    pub fn socket(&self) -> PathBuf {
        socket_path(&self.dir)
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("postgres.log")
    }

    pub fn password_file(&self) -> PathBuf {
        self.dir.join("superuser.pw")
    }

    pub fn turn_lock(&self) -> PathBuf {
        self.dir.join("turn.lock")
    }

    pub fn attached_lock(&self) -> PathBuf {
        self.dir.join("attached.lock")
    }

    /// Creates a folder that only the server's account may enter.
    pub fn give_dir(&self, path: &Path) -> Result<(), PostgresError> {
        create_dir(path, 0o700)?;
        self.give(path)
    }

    /// Makes the server's account the owner.
    pub fn give(&self, path: &Path) -> Result<(), PostgresError> {
        match &self.account {
            Some(account) => chown(path, Some(account.uid), Some(account.gid))
                .map_err(io(format!("the owner of {} cannot be set", path.display()))),
            None => Ok(()),
        }
    }
}

/// A kept cluster stays with the account that owns it; a new one goes to the distribution's account, else to nobody.
fn account_for_root(owner: Option<Metadata>) -> Result<Account, PostgresError> {
    let passwd = std::fs::read_to_string("/etc/passwd").map_err(io("/etc/passwd is unreadable"))?;
    let accounts: Vec<Account> = passwd.lines().filter_map(account_of_line).collect();
    let found = match owner.filter(|owner| owner.uid() != 0) {
        Some(owner) => accounts
            .iter()
            .find(|a| a.uid == owner.uid())
            .cloned()
            .or_else(|| {
                let name = format!("uid {}", owner.uid());
                Some(Account {
                    name,
                    uid: owner.uid(),
                    gid: owner.gid(),
                })
            }),
        None => ["postgres", "nobody"].iter().find_map(|name| {
            accounts
                .iter()
                .find(|a| a.name == *name && a.uid != 0)
                .cloned()
        }),
    };
    found.ok_or(PostgresError::NoAccount)
}

fn account_of_line(line: &str) -> Option<Account> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Account { name, uid, gid })
}

/// Every folder on the way must let the account through. As root we would not notice ourselves.
pub fn check_reachable(dir: &Path, account: &Account) -> Result<(), PostgresError> {
    let mut way: Vec<&Path> = dir.ancestors().collect();
    way.reverse();
    for dir in way {
        let meta = dir
            .metadata()
            .map_err(io(format!("{} cannot be looked at", dir.display())))?;
        let may_enter = if meta.uid() == account.uid {
            0o100
        } else if meta.gid() == account.gid {
            0o010
        } else {
            0o001
        };
        if meta.mode() & may_enter == 0 {
            let account = account.name.clone();
            return Err(PostgresError::NotReachable {
                account,
                dir: dir.to_owned(),
            });
        }
    }
    Ok(())
}

fn socket_path(dir: &Path) -> PathBuf {
    dir.join("run").join(format!(".s.PGSQL.{PORT}"))
}

fn check_socket_path(dir: &Path) -> Result<(), PostgresError> {
    let path = socket_path(dir);
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(PostgresError::SocketPathTooLong {
            path,
            length,
            limit: SOCKET_PATH_MAX,
        });
    }
    Ok(())
}

/// Creates the folder with this mode whatever the umask; leaves an existing one alone.
fn create_dir(path: &Path, mode: u32) -> Result<(), PostgresError> {
    if path.is_dir() {
        return Ok(());
    }
    let failed = || io(format!("the folder {} cannot be created", path.display()));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed())?;
    }
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed()),
        // Another process was faster.
        Err(err) if err.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(err) => Err(failed()(err)),
    }
}

/// 64 hexadecimal digits from the system's random numbers.
pub fn random_secret() -> String {
    format!(
        "{}{}",
        uuid::Uuid::new_v4().simple(),
        uuid::Uuid::new_v4().simple()
    )
}

/// Writes a new file that only its owner may read.
pub fn write_secret(path: &Path, text: &str) -> Result<(), PostgresError> {
    let failed = || io(format!("{} cannot be written", path.display()));
    match std::fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => return Err(failed()(err)),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed())?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(failed())
}

/// See `Embedded::secret`.
pub fn kept_secret(data_dir: &Path, name: &str) -> Result<SecretString, PostgresError> {
    let root = rustix::process::geteuid().is_root();
    create_dir(data_dir, if root { 0o711 } else { 0o700 })?;
    let path = data_dir.join(name);
    if !path.exists() {
        // Written aside and linked into place: nobody reads half a secret, and the first one to link wins.
        let aside = data_dir.join(format!("{name}.{}", uuid::Uuid::now_v7().simple()));
        write_secret(&aside, &random_secret())?;
        let linked = std::fs::hard_link(&aside, &path);
        let _ = std::fs::remove_file(&aside);
        match linked {
            Err(err) if err.kind() != ErrorKind::AlreadyExists => {
                return Err(io(format!("{} cannot be written", path.display()))(err));
            }
            _ => {}
        }
    }
    let text =
        std::fs::read_to_string(&path).map_err(io(format!("{} cannot be read", path.display())))?;
    let text = text.trim();
    if text.len() < 64 {
        let short = std::io::Error::new(ErrorKind::InvalidData, "it has fewer than 64 characters");
        return Err(io(format!(
            "{} is damaged; delete it to get a new secret (tokens made with the old one stop working)",
            path.display()
        ))(short));
    }
    Ok(text.to_owned().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_of_passwd() {
        let account = |line| account_of_line(line).map(|a| (a.name, a.uid, a.gid));
        assert_eq!(
            account("postgres:x:104:109:PostgreSQL administrator,,,:/var/lib/postgresql:/bin/bash"),
            Some(("postgres".to_owned(), 104, 109))
        );
        assert_eq!(account("broken"), None);
        assert_eq!(account("a:x:b:c"), None);
    }
}
