//! The operator's keys, and what is encrypted under them: AES-256 in Galois/counter mode, which also proves that nothing
//! was changed.
//!
//! A value is bound to its workspace and its id: a row that is copied to another place of the database can not be read
//! there. Each value names the key it was made with, so keys can be replaced one after another: new values are made with
//! the first key, all keys are tried by name when reading, and `reconvene reencrypt` moves the old values. No error and no
//! log here holds a value or a key.

use crate::config::Credentials;
use crate::domain::credential::Sealed;
use crate::domain::ids::WorkspaceId;
use aes_gcm::aead::{Aead, Generate, Payload};
use aes_gcm::{Aes256Gcm, KeyInit, Nonce};
use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

const NONCE_BYTES: usize = 12;

/// Where a value belongs.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub workspace: WorkspaceId,
    pub id: Uuid,
}

impl Place {
    fn bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(self.workspace.0.as_bytes());
        bytes[16..].copy_from_slice(self.id.as_bytes());
        bytes
    }
}

/// Why a value can not be encrypted or read, and what the operator is to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    #[error(
        "this deployment has no key to encrypt secrets with: the operator sets credentials.keys (CREDENTIALS_KEYS)"
    )]
    NoKey,
    #[error(
        "it is encrypted under the operator's key `{0}`, which this process does not have: the operator adds it to credentials.keys (CREDENTIALS_KEYS)"
    )]
    MissingKey(String),
    #[error(
        "it can not be decrypted with the operator's key `{0}`: that id now names another key, or the row was changed"
    )]
    Damaged(String),
}

/// One per process.
pub struct Vault {
    /// Newest first.
    keys: Vec<(String, Aes256Gcm)>,
}

impl Vault {
    /// `credentials` has been checked when the configuration was read.
    pub fn from_config(credentials: &Credentials) -> Self {
        let keys = credentials.keys.iter().filter_map(|key| {
            let (id, key) = Credentials::read_key(key.expose_secret())?;
            Some((id.to_owned(), Aes256Gcm::new(&key.into())))
        });
        Vault {
            keys: keys.collect(),
        }
    }

    /// The id of the key that new values are made with.
    pub fn newest(&self) -> Result<&str, VaultError> {
        let (id, _) = self.keys.first().ok_or(VaultError::NoKey)?;
        Ok(id)
    }

    /// Whether values under the key of this id can be read.
    pub fn has_key(&self, id: &str) -> bool {
        self.keys.iter().any(|(known, _)| known == id)
    }

    pub fn seal(&self, place: Place, value: &SecretString) -> Result<Sealed, VaultError> {
        let (id, key) = self.keys.first().ok_or(VaultError::NoKey)?;
        let nonce = Nonce::generate();
        let payload = Payload {
            msg: value.expose_secret().as_bytes(),
            aad: &place.bytes(),
        };
        let encrypted = key
            .encrypt(&nonce, payload)
            .map_err(|_| VaultError::Damaged(id.clone()))?;
        Ok(Sealed {
            key_id: id.clone(),
            bytes: [nonce.as_slice(), &encrypted].concat(),
        })
    }

    pub fn open(&self, place: Place, sealed: &Sealed) -> Result<SecretString, VaultError> {
        let named = self.keys.iter().find(|(id, _)| *id == sealed.key_id);
        let (id, key) = named.ok_or_else(|| VaultError::MissingKey(sealed.key_id.clone()))?;
        let damaged = || VaultError::Damaged(id.clone());
        let (nonce, encrypted) = sealed
            .bytes
            .split_at_checked(NONCE_BYTES)
            .ok_or_else(damaged)?;
        let nonce = Nonce::try_from(nonce).map_err(|_| damaged())?;
        let payload = Payload {
            msg: encrypted,
            aad: &place.bytes(),
        };
        let value = key.decrypt(&nonce, payload).map_err(|_| damaged())?;
        let value = String::from_utf8(value).map_err(|_| damaged())?;
        Ok(value.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vault(keys: &[(&str, u8)]) -> Vault {
        let key = |(id, byte): &(&str, u8)| format!("{id}:{}", format!("{byte:02x}").repeat(32));
        Vault::from_config(&Credentials {
            keys: keys.iter().map(|k| key(k).into()).collect(),
        })
    }

    fn place(workspace: u128, id: u128) -> Place {
        Place {
            workspace: WorkspaceId(Uuid::from_u128(workspace)),
            id: Uuid::from_u128(id),
        }
    }

    // L-9
    #[test]
    fn a_value_is_read_only_at_its_place_with_its_key_and_unchanged() {
        let value: SecretString = "s3cr3t é".to_owned().into();
        let here = place(1, 2);
        let old = vault(&[("a", 1)]);
        let sealed = old.seal(here, &value).unwrap();
        assert_eq!(sealed.key_id, "a");
        assert_ne!(
            sealed,
            old.seal(here, &value).unwrap(),
            "the nonce is a new one each time"
        );
        let shown = String::from_utf8_lossy(&sealed.bytes).into_owned();
        assert!(!shown.contains("s3cr3t"));
        let open = |vault: &Vault, place, sealed: &Sealed| {
            vault
                .open(place, sealed)
                .map(|value| value.expose_secret().to_owned())
        };
        let rotated = vault(&[("b", 2), ("a", 1)]);
        assert_eq!(open(&rotated, here, &sealed).unwrap(), "s3cr3t é");
        assert_eq!(rotated.seal(here, &value).unwrap().key_id, "b");
        let damaged = Err(VaultError::Damaged("a".into()));
        for elsewhere in [place(1, 3), place(3, 2), place(2, 1)] {
            assert_eq!(open(&rotated, elsewhere, &sealed), damaged);
        }
        for at in 0..sealed.bytes.len() {
            let mut changed = sealed.clone();
            changed.bytes[at] ^= 1;
            assert_eq!(open(&rotated, here, &changed), damaged, "byte {at}");
        }
        for cut in [0, 5, NONCE_BYTES, sealed.bytes.len() - 1] {
            let mut changed = sealed.clone();
            changed.bytes.truncate(cut);
            assert_eq!(open(&rotated, here, &changed), damaged, "{cut} bytes");
        }
        assert_eq!(open(&vault(&[("a", 9)]), here, &sealed), damaged);
        let gone = open(&vault(&[("b", 1)]), here, &sealed);
        assert_eq!(gone, Err(VaultError::MissingKey("a".into())));
        let none = vault(&[]);
        assert_eq!(none.seal(here, &value), Err(VaultError::NoKey));
        assert_eq!(none.newest(), Err(VaultError::NoKey));
    }
}
