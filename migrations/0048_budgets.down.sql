set local lock_timeout = '500ms';

drop table budget_calls;
drop table budgets;
