//! Makes and checks password hashes (argon2id) beside the async threads, a few at a time: each takes 19 MB and some
//! hundredths of a second of one core.

use argon2::Argon2;
use argon2::password_hash::{PasswordHasher, PasswordVerifier, phc::PasswordHash};
use secrecy::{ExposeSecret, SecretString};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// A hash of nothing that anybody could type, with the costs of [`Argon2::default`]: an unknown name is checked against it,
/// so that the answer takes as long as for a known one.
const OF_NOBODY: &str = "$argon2id$v=19$m=19456,t=2,p=1$c2FsdCBvZiBub2JvZHkhIQ$AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8";

/// One per process.
pub struct Passwords {
    gate: Arc<Semaphore>,
}

/// No sentence of the library is passed on: it might hold what it was given.
#[derive(Debug, thiserror::Error)]
#[error("a password could not be hashed")]
pub struct HashError;

impl Default for Passwords {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
        Self {
            gate: Arc::new(Semaphore::new(cores)),
        }
    }
}

impl Passwords {
    pub async fn hash(&self, password: SecretString) -> Result<String, HashError> {
        self.beside(move || {
            let hash = Argon2::default().hash_password(password.expose_secret().as_bytes());
            hash.map(|hash| hash.to_string()).map_err(|_| HashError)
        })
        .await?
    }

    /// Whether the password is the one of this hash. `None`, an account that does not exist, takes as long and is never.
    pub async fn verify(
        &self,
        password: SecretString,
        hash: Option<String>,
    ) -> Result<bool, HashError> {
        self.beside(move || {
            let exists = hash.is_some();
            let hash = hash.as_deref().unwrap_or(OF_NOBODY);
            let hash = PasswordHash::new(hash).map_err(|_| HashError)?;
            let fits = Argon2::default()
                .verify_password(password.expose_secret().as_bytes(), &hash)
                .is_ok();
            Ok(exists && fits)
        })
        .await?
    }

    async fn beside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, HashError> {
        // Held until the work has ended, also when the request that asked for it is given up.
        let permit = self
            .gate
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| HashError)?;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        })
        .await
        .map_err(|_| HashError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use argon2::{Algorithm, Params};

    // P-4
    #[tokio::test]
    async fn a_hash_fits_its_password_only() {
        let passwords = Passwords::default();
        let hash = passwords
            .hash("correct horse battery".into())
            .await
            .unwrap();
        assert!(hash.starts_with("$argon2id$") && !hash.contains("horse"));
        assert_ne!(
            hash,
            passwords
                .hash("correct horse battery".into())
                .await
                .unwrap(),
            "salted"
        );
        let verify = async |password: &str, hash: Option<&str>| {
            passwords
                .verify(password.into(), hash.map(str::to_owned))
                .await
                .unwrap()
        };
        assert!(verify("correct horse battery", Some(&hash)).await);
        assert!(!verify("correct horse batterz", Some(&hash)).await);
        assert!(!verify("correct horse battery", None).await);
    }

    // P-4: nobody's hash is one that costs what a real one does.
    #[tokio::test]
    async fn nobody_costs_as_much_as_somebody() {
        let made = Passwords::default().hash("x".into()).await.unwrap();
        let costs = |hash: &str| {
            hash.split('$')
                .take(4)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(costs(OF_NOBODY), costs(&made));
        let nobody = PasswordHash::new(OF_NOBODY).unwrap();
        assert_eq!(nobody.algorithm, Algorithm::Argon2id.ident());
        assert_eq!(nobody.hash.unwrap().len(), Params::DEFAULT_OUTPUT_LEN);
    }
}
