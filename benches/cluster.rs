//! A fresh embedded cluster in a folder of its own, as the service makes it (fsync on), and what is read from it.

use anyhow::Context;
use reconvene::{
    commands::migrate,
    lifecycle::demo::{Demo, seed_demo},
    postgres::Embedded,
};
use sqlx::{Connection, PgConnection, PgPool, postgres::PgPoolOptions};
use std::{path::PathBuf, time::Duration};

pub struct Cluster {
    pub data_dir: PathBuf,
    pub pool: PgPool,
    pub embedded: Embedded,
    pub demo: Demo,
}

impl Cluster {
    pub async fn make(data_dir: PathBuf, prepare: &[String]) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&data_dir)
            .with_context(|| format!("{} can not be made", data_dir.display()))?;
        let embedded = Embedded::open(&data_dir, None).await?;
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .connect_with(embedded.options().application_name("bench"))
            .await?;
        migrate::apply(&pool).await?;
        let demo = seed_demo(&pool).await?;
        sqlx::query(
            "create function ms(i interval) returns float8 language sql as
             $$ select (extract(epoch from i) * 1000)::float8 $$",
        )
        .execute(&pool)
        .await?;
        for sql in prepare {
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone()))
                .execute(&pool)
                .await
                .with_context(|| format!("this can not be run: {sql}"))?;
        }
        Ok(Self {
            data_dir,
            pool,
            embedded,
            demo,
        })
    }

    /// Whether no connection of the service is at work or within a transaction.
    pub async fn is_quiet(&self) -> anyhow::Result<bool> {
        Ok(sqlx::query_scalar(
            "select not exists (select from pg_stat_activity
                where datname = current_database() and application_name = 'reconvene' and state <> 'idle')",
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// The database's processes that serve the benchmark itself.
    pub async fn own_backends(&self) -> anyhow::Result<Vec<u32>> {
        let pids: Vec<i32> =
            sqlx::query_scalar("select pid from pg_stat_activity where application_name = 'bench'")
                .fetch_all(&self.pool)
                .await?;
        Ok(pids.into_iter().map(|pid| pid as u32).collect())
    }

    /// Does what earlier loads have left to do, so that it is not taken for rest.
    pub async fn tidy(&self) -> anyhow::Result<()> {
        let mut conn = PgConnection::connect_with(&self.embedded.options()).await?;
        for sql in ["vacuum analyze", "checkpoint"] {
            sqlx::raw_sql(sql).execute(&mut conn).await?;
        }
        conn.close().await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(())
    }

    /// Stops the server and, unless it is to be kept, removes the folder.
    pub async fn close(self, keep: bool) -> anyhow::Result<()> {
        self.pool.close().await;
        self.embedded.close().await?;
        if !keep {
            let _ = std::fs::remove_dir_all(&self.data_dir);
        }
        Ok(())
    }
}

/// What the database has been made to write since the start.
pub struct Meter {
    xid: i64,
    lsn: i64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// Transactions that wrote something: each took a transaction id and waited for the disk.
    pub commits: f64,
    pub wal_bytes: f64,
}

impl Meter {
    pub async fn start(pool: &PgPool) -> anyhow::Result<Self> {
        let (xid, lsn) = sqlx::query_as(
            "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
                (pg_current_wal_insert_lsn() - '0/0')::bigint",
        )
        .fetch_one(pool)
        .await?;
        Ok(Self { xid, lsn })
    }

    pub async fn stop(self, pool: &PgPool) -> anyhow::Result<Used> {
        let now = Self::start(pool).await?;
        Ok(Used {
            commits: (now.xid - self.xid) as f64,
            wal_bytes: (now.lsn - self.lsn) as f64,
        })
    }
}
