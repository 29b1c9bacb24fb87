//! `serve`: the roles of one process, from start to the end of the grace.

use super::{database, migrate};
use crate::config::Config;
use clap::ValueEnum;
use std::fmt;

/// What a process may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Takes requests and shows state
    Api,
    /// Asks models, runs tools
    Worker,
    /// Moves tasks
    Orchestrator,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Api, Role::Worker, Role::Orchestrator];
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Api => "api",
            Role::Worker => "worker",
            Role::Orchestrator => "orchestrator",
        })
    }
}

/// The roles of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    pub api: bool,
    pub worker: bool,
    pub orchestrator: bool,
}

impl Roles {
    pub const ALL: Roles = Roles {
        api: true,
        worker: true,
        orchestrator: true,
    };

    pub fn of(roles: &[Role]) -> Roles {
        Roles {
            api: roles.contains(&Role::Api),
            worker: roles.contains(&Role::Worker),
            orchestrator: roles.contains(&Role::Orchestrator),
        }
    }
}

pub async fn run(mut config: Config, _roles: Roles) -> anyhow::Result<()> {
    database::settle_signing_secret(&mut config)?;
    let database = database::open_database(&config).await?;
    migrate::settle(&database).await?;
    database.close().await?;
    anyhow::bail!("`serve` has no roles to run yet")
}
