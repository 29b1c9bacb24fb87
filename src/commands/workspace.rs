//! `workspace create`: a tenant with its default agent.

use super::{Refused, UsageError, database, migrate};
use crate::config::Config;
use crate::lifecycle::agents::{CreateWorkspaceError, create_workspace};
use clap::Args;

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  reconvene workspace create --slug acme --name \"Acme Ltd\"
  reconvene workspace create --slug acme --name \"Acme Ltd\" --json")]
pub struct CreateArgs {
    /// Its name in commands: a-z, 0-9 and `-`, at most 63 characters
    #[arg(long)]
    slug: String,
    /// Its name for people, at most 100 characters
    #[arg(long)]
    name: String,
    /// Print {"id":...,"slug":...,"name":...}
    #[arg(long)]
    json: bool,
}

pub async fn create(config: &Config, args: CreateArgs) -> anyhow::Result<()> {
    let database = database::open_database(config).await?;
    let outcome = async {
        migrate::settle(&database).await?;
        create_workspace(&database.pool, &args.slug, &args.name)
            .await
            .map_err(|err| match err {
                CreateWorkspaceError::SlugTaken(_) => Refused(err.to_string()).into(),
                CreateWorkspaceError::BadSlug(_) | CreateWorkspaceError::BadName => {
                    UsageError(err.to_string()).into()
                }
                CreateWorkspaceError::Store(_) => anyhow::Error::new(err),
            })
    };
    let outcome = outcome.await;
    database.close().await?;
    let id = outcome?;
    let (slug, name) = (args.slug, args.name.trim());
    match args.json {
        true => super::print(serde_json::json!({ "id": id, "slug": slug, "name": name })),
        false => super::print(format_args!("workspace {slug} created: {id}")),
    }
}
