//! `dev`: everything in one process, with a demo workspace and one delegation to look at.

use super::{database, migrate};
use crate::config::Config;

pub async fn run(mut config: Config, _once: bool) -> anyhow::Result<()> {
    database::settle_signing_secret(&mut config)?;
    let database = database::open_database(&config).await?;
    migrate::settle(&database).await?;
    database.close().await?;
    anyhow::bail!("`dev` has nothing to show yet")
}
