set local lock_timeout = '500ms';

create unique index if not exists profile_backfills_running_key on profile_backfills (workspace_id) where status = 'running';
