set local lock_timeout = '500ms';

-- When the text was sent last, to within a day: one that no kept decision log can name is removed.
alter table prompt_texts add column used_at timestamptz not null default now();
