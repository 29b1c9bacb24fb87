//! Workspaces: the rows that everything else belongs to. Only operators may see a list of them.

use super::Error;
use crate::domain::ids::WorkspaceId;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub id: WorkspaceId,
    pub slug: String,
    pub name: String,
    pub created_at: DateTime<Utc>,
}

/// `false` when the slug is taken, by a deleted workspace too.
pub async fn insert(
    conn: &mut PgConnection,
    id: WorkspaceId,
    slug: &str,
    name: &str,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "insert into workspaces (id, slug, name) values ($1, $2, $3) on conflict (slug) do nothing",
        id.0,
        slug,
        name
    )
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn by_slug(conn: &mut PgConnection, slug: &str) -> Result<Option<Workspace>, Error> {
    Ok(sqlx::query_as!(
        Workspace,
        r#"select id as "id: WorkspaceId", slug, name, created_at from workspaces
        where slug = $1 and deleted_at is null"#,
        slug
    )
    .fetch_optional(conn)
    .await?)
}

pub async fn get(conn: &mut PgConnection, id: WorkspaceId) -> Result<Option<Workspace>, Error> {
    Ok(sqlx::query_as!(
        Workspace,
        r#"select id as "id: WorkspaceId", slug, name, created_at from workspaces
        where id = $1 and deleted_at is null"#,
        id.0
    )
    .fetch_optional(conn)
    .await?)
}

/// In order of creation, after the workspace `after`.
pub async fn list_all(
    conn: &mut PgConnection,
    after: Option<WorkspaceId>,
    limit: i64,
) -> Result<Vec<Workspace>, Error> {
    Ok(sqlx::query_as!(
        Workspace,
        r#"select id as "id: WorkspaceId", slug, name, created_at from workspaces
        where deleted_at is null and ($1::uuid is null or id > $1) order by id limit $2"#,
        after.map(|after| after.0),
        limit
    )
    .fetch_all(conn)
    .await?)
}
